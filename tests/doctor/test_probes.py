"""Probes, which are checks in a process of their own: of a data directory and of a GPU, and probes
that hang, crash or print other text.
"""

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.doctor import checks, data_dir
from kvstore.doctor.checks import FindingState, probed
from kvstore.doctor.data_dir import file_system, findings

LONG_S = 60.0


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    (tmp_path / "some_probe.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_probe"


def test_probe_of_a_data_directory_passes(tmp_path: Path) -> None:
    found = list(
        probed("data directory", "kvstore.doctor.data_dir", [str(tmp_path)], LONG_S, "mend it")
    )
    assert [finding.name for finding in found] == [
        "data directory",
        "file system",
        "room",
        "O_DIRECT",
        "speed",
    ]
    assert found[0].state is FindingState.OK
    assert "MB/s written" in found[-1].found
    assert list(tmp_path.iterdir()) == []


def test_missing_data_directory_passes_if_it_can_be_created(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in findings(tmp_path / "a" / "b")}
    assert f"makes it in {tmp_path}" in found["data directory"].found
    assert list(tmp_path.iterdir()) == []


def test_file_as_data_directory_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    found = list(findings(path))
    assert found[0].state is FindingState.FAIL
    assert found[-1].state is FindingState.SKIPPED


def test_unwritable_data_directory_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    found = data_dir.permission(tmp_path, tmp_path)
    assert (found.state, "chown" in found.remedy) == (FindingState.FAIL, True)


MOUNTS = """\
/dev/vda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/x /mnt/far\\040away nfs4 rw 0 0
/dev/sdb /data ext3 rw 0 0
/dev/nvme0n1 /data xfs rw 0 0
some /mnt/some fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "state", "message"),
    [
        ("/var/lib", FindingState.OK, "ext4 on /dev/vda1"),
        ("/data/pages", FindingState.OK, "xfs on /dev/nvme0n1"),
        ("/database", FindingState.OK, "ext4"),
        ("/tmp", FindingState.WARN, "tmpfs"),
        ("/mnt/some", FindingState.WARN, "fuse.sshfs"),
        ("/mnt/far away/pages", FindingState.WARN, "nfs4 on server:/x"),
    ],
)
def test_unsuitable_file_systems_are_a_warning(
    path: str, state: FindingState, message: str
) -> None:
    found = file_system(Path(path), MOUNTS)
    assert found.state is state
    assert message in found.found


def test_file_system_without_o_direct_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without)
    found = {finding.name: finding for finding in findings(tmp_path)}
    assert found["O_DIRECT"].state is FindingState.WARN
    assert "MB/s written" in found["speed"].found


def test_little_free_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_blocks, f_frsize, f_files, f_favail = 1000, 1 << 30, 4096, 1 << 20, 1 << 20

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert data_dir.free_space(tmp_path).state is FindingState.FAIL
    Full.f_bavail, Full.f_favail = 1 << 29, 10
    assert data_dir.free_space(tmp_path).state is FindingState.WARN
    Full.f_files = 0  # a file system that does not count them
    found = data_dir.free_space(tmp_path)
    assert (found.state, found.found.rpartition(" ")[2]) == (FindingState.OK, "1,945.6GiB"), (
        "of 2,048 GiB, a twentieth is reserved for rows"
    )


@pytest.mark.parametrize(
    ("sync_s", "write_s", "state"),
    [
        (0.001, 0.001, FindingState.OK),
        (0.06, 0.001, FindingState.WARN),
        (0.001, 0.02, FindingState.WARN),
    ],
)
def test_slow_disk_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sync_s: float,
    write_s: float,
    state: FindingState,
) -> None:
    now, pwrite, preadv = [0.0], os.pwrite, os.preadv

    def written(*given: Any) -> int:
        now[0] += write_s
        return pwrite(*given)

    def synced(fd: int) -> None:
        now[0] += sync_s

    def read(*given: Any) -> int:
        now[0] += 0.001
        return preadv(*given)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(data_dir, "WRITTEN_NBYTES", 4 << 20)
    with open(tmp_path / "file", "w+b") as file:
        found = data_dir.speed(file.fileno())
    assert found.state is state


def test_nearly_full_disk_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed test is skipped on a nearly full disk, as it could make a node's writes fail."""
    written: list[int] = []
    monkeypatch.setattr(data_dir, "_free_nbytes", lambda where: data_dir.ROOM_NBYTES - 1)
    monkeypatch.setattr(os, "pwrite", lambda fd, page, at: written.append(len(page)))
    found = {finding.name: finding for finding in findings(tmp_path)}
    assert (found["room"].state, found["speed"].state, written) == (
        FindingState.FAIL,
        FindingState.SKIPPED,
        [],
    )


def test_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", closed)
    (found,) = findings(tmp_path / "data")
    assert (found.state, "may not look into" in found.found, "node's user" in found.remedy) == (
        FindingState.FAIL,
        True,
        True,
    )


def test_unkillable_probe_is_abandoned_with_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that can not be killed, as it waits in the kernel for a disk, is abandoned.

    Its findings so far count.
    """
    processes: list[subprocess.Popen[bytes]] = []

    class Stuck(subprocess.Popen[bytes]):
        def kill(self) -> None:
            processes.append(self)

    line = '{"name": "first", "state": "ok", "found": "there", "remedy": ""}'
    name = module(
        tmp_path, monkeypatch, f"import time\nprint({line!r}, flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(subprocess, "Popen", Stuck)
    try:
        for limit_s in (0.5, 4.0, 32.0):  # on a busy machine, the probe may start late
            *before, last = probed("disk", name, [], limit_s, "mend the disk")
            assert (last.found, last.remedy) == (f"hangs: no end in {limit_s:g} s", "mend the disk")
            if before:
                break
        assert [finding.name for finding in before] == ["first"]
    finally:
        for process in processes:
            super(Stuck, process).kill()
            process.wait()


def test_findings_before_a_hang_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"name": "first", "state": "ok", "found": "there", "remedy": ""}'
    name = module(
        tmp_path, monkeypatch, f"import time\nprint({line!r}, flush=True)\ntime.sleep(600)\n"
    )
    for limit_s in (0.5, 4.0, 32.0):  # on a busy machine, the probe may start late
        *before, last = probed("disk", name, [], limit_s, "mend the disk")
        assert (last.state, last.remedy) == (FindingState.FAIL, "mend the disk")
        assert last.found == f"hangs: no end in {limit_s:g} s"
        if before:
            break
    assert [(finding.name, finding.state) for finding in before] == [("first", FindingState.OK)]


def test_probe_that_can_not_run_reports_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(tmp_path, monkeypatch, "print('a library talks')\nimport torch_of_nobody")
    (found,) = probed("GPU", name, [], LONG_S, "another Python")
    assert found.state is FindingState.FAIL
    assert found.found == "ModuleNotFoundError: No module named 'torch_of_nobody'"


LINE = '{"name": "first", "state": "ok", "found": "there", "remedy": ""}'
BREAKS = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"


def test_probe_that_crashes_before_its_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(tmp_path, monkeypatch, f"print({LINE!r}, flush=True)\n{BREAKS}")
    first, last = probed("GPU", name, [], LONG_S, "another Python")
    assert first.state is FindingState.OK
    assert (last.state, last.found) == (FindingState.FAIL, "it was ended by SIGSEGV")


def test_probe_that_crashes_after_its_end_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from kvstore.doctor.checks import ok, print_findings\n"
        "print_findings([ok('first', 'there')])\n"
    )
    name = module(tmp_path, monkeypatch, program + BREAKS)
    first, last = probed("GPU", name, [], LONG_S, "another Python")
    assert first.state is FindingState.OK
    assert (last.state, last.remedy) == (FindingState.WARN, "another Python")
    assert "the checks completed" in last.found
    assert "SIGSEGV" in last.found


def test_probe_that_ends_well_yields_its_findings_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from kvstore.doctor.checks import ok, print_findings\n"
        "print_findings([ok('first', 'there')])\n"
    )
    name = module(tmp_path, monkeypatch, program)
    assert [finding.name for finding in probed("GPU", name, [], LONG_S, "another Python")] == [
        "first"
    ]


@pytest.mark.parametrize(("status", "text"), [(3, "status 3"), (-9, "SIGKILL"), (-60, "signal 60")])
def test_exit_status_is_described(status: int, text: str) -> None:
    assert checks.ending(status).endswith(text)
