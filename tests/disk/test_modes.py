"""A node's files are readable by its own user only, whatever the umask.

An existing directory with wider permissions is reported, not changed.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from disk_nodes import Pages

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess
from node.disk.data_dir import open_to_others

FLAGS = ("--ram-bytes", "4MiB", "--disk-bytes", "64MiB", "--disk-extent-bytes", "4MiB")
WIDE = (sys.executable, "-c", "import os, sys; os.umask(0); os.execvp(sys.argv[1], sys.argv[1:])")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private_and_a_wider_directory_is_reported_with_a_remedy(tmp_path: Path) -> None:
    """All files of a node under umask 0, with those of RocksDB and the audit log, are private.

    A directory that others may read is not changed.
    """
    pages, data, audit = Pages("modes", 4096), tmp_path / "above" / "data of mine", tmp_path / "log"
    identities = tmp_path / "identities"
    identities.write_text("")
    identities.chmod(0o600)
    open_flags = (*FLAGS, "--data-dir", str(data))
    with NodeProcess(*open_flags, inside=WIDE) as process:
        with Client(ClientConfig(address=process.address, timeout_s=20.0)) as client:
            pages.put(client, pages.keys(*range(8)))
            client.flush()
        assert "readable for other users" not in process.log_text
    there = [data, *data.rglob("*")]
    assert {path.name for path in there} >= {"rows", "extents", "lock", "keeper.lock"}
    assert len(list((data / "rows").iterdir())) > 3
    assert_private(data, there)

    for path in (data, data / "rows"):
        path.chmod(0o755)
    audited = ("--audit-log", str(audit), "--identities", str(identities))
    with NodeProcess(*open_flags, *audited, inside=WIDE) as process:
        (warning,) = [
            line for line in process.log_text.splitlines() if "readable for other users" in line
        ]
        assert mode(data) == mode(data / "rows") == 0o755
    assert_private(data, [audit])
    remedy = warning.partition("close it with: ")[2]
    assert remedy == f"chmod -R o= '{data}'"
    subprocess.run(["sh", "-c", remedy], check=True)
    with (
        NodeProcess(*open_flags) as process,
        Client(ClientConfig(address=process.address, timeout_s=20.0)) as client,
    ):
        assert pages.get(client, pages.keys(0)) == [True]
        assert "readable for other users" not in process.log_text


def assert_private(data: Path, there: list[Path]) -> None:
    too_open = {str(path): oct(mode(path)) for path in there if mode(path) & 0o077}
    assert not too_open
    assert all(
        mode(path) == (0o700 if path.is_dir() else 0o600)
        for path in there
        if path.parent != data / "rows"
    )


@pytest.mark.parametrize(
    ("top", "inside", "is_open"),
    [
        (0o700, 0o755, False),
        (0o750, 0o755, False),  # other users can not enter the top directory
        (0o755, 0o700, False),  # a mount point owned by another user, as in Kubernetes
        (0o2775, 0o2770, False),
        (0o755, 0o755, True),
        (0o711, 0o644, True),
        (0o777, 0o700, True),  # others may rename its files
    ],
)
def test_open_to_others_considers_the_whole_path(
    tmp_path: Path, top: int, inside: int, is_open: bool
) -> None:
    data = tmp_path / "data"
    (data / "rows").mkdir(parents=True)
    os.chmod(data / "rows", inside)
    os.chmod(data, top)
    assert bool(open_to_others(data)) == is_open
