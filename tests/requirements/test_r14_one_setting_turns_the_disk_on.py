"""R14: a data directory is all it takes to have a disk tier, and the status shows its bytes."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstore.measure.node_process import NodeProcess

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(4)]


def test_r14_the_data_dir_alone_turns_the_disk_tier_on(
    tmp_path: Path, connect: Any, make_chain: Any, wire: str
) -> None:
    with NodeProcess("--data-dir", str(tmp_path / "new" / "data")) as process:
        client = connect(process.address, wire)
        before = client.node_status().disk
        assert (before.state, before.used_nbytes, before.page_count) == ("SERVING", 0, 0)
        assert before.capacity_nbytes > 0
        chain = make_chain("chain", 100_000)
        chain.put(client, KEYS)
        assert client.flush() == 4
        disk = client.node_status().disk
        assert (disk.page_count, disk.pages_written, disk.nbytes_written) == (4, 4, 400_000)
        assert disk.used_nbytes == 4 * 102_400  # slots of 4 KiB
        assert disk.queue_nbytes == 0
        shown = subprocess.run(
            [sys.executable, "-m", "kvstore.cli.app", "--address", process.address, "status"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert "disk" in shown.stdout
        assert str(tmp_path / "new" / "data") in shown.stdout.replace("\n", "")


def test_r14_without_it_there_is_none(connect: Any) -> None:
    with NodeProcess("--ram-bytes", "1MiB") as process:
        assert not connect(process.address).node_status().HasField("disk")
