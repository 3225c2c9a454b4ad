"""Run nodes on small file systems of their own: tmpfs, and ext4 on a loop device.

Run these tests with `make test-full-disk`. `make test` leaves them out: they need root.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

if not os.environ.get("KVSTORE_FULL_DISK"):
    collect_ignore_glob = ["test_*.py"]
elif os.geteuid():
    pytest.exit("make test-full-disk: needs root", 2)

MIB = 1 << 20
SIZE_NBYTES = 96 * MIB


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the mount point of a small, empty file system."""
    mount, image = tmp_path / "small", tmp_path / "image"
    mount.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_NBYTES}", "kvstore", str(mount)]
    else:
        with open(image, "wb") as file:
            file.truncate(SIZE_NBYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        command = ["mount", "-o", "loop", str(image), str(mount)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip(f"can not mount a {request.param} here")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)
