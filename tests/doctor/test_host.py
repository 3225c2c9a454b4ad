"""The doctor's checks of a host, from fake /proc and /sys files."""

import ctypes
import resource
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.doctor import host
from kvstore.doctor.checks import FindingState
from kvstore.doctor.host import SHMEM_ENABLED, Host, unsynchronised
from kvstore.errors import Unavailable

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max address space         {space:<20} unlimited            bytes
Max locked memory         {locked:<20} {locked_hard:<20} bytes
Max open files            1024                 {files:<20} files
"""
MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    {available} kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root folder of a healthy host."""
    limits(tmp_path)
    write(tmp_path, "proc/meminfo", MEMINFO.format(available=8 << 20))
    write(tmp_path, SHMEM_ENABLED, "always within_size [advise] never deny force\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def limits(root: Path, **values: str) -> None:
    known = {
        "space": "unlimited",
        "locked": "unlimited",
        "locked_hard": "unlimited",
        "files": "524288",
    }
    write(root, "proc/self/limits", LIMITS.format(**{**known, **values}))


def of(root: Path, **about: Any) -> Host:
    return Host(root=root, **{"clock": lambda: False, **about})


def test_healthy_host_passes(root: Path) -> None:
    found = list(of(root, serves=True, has_gpu=True).findings())
    assert [finding.name for finding in found if finding.state is not FindingState.OK] == []
    assert {"versions", "descriptors", "shared memory", "locked memory", "huge pages", "clock"} <= {
        finding.name for finding in found
    }


def test_low_limit_of_open_files_is_a_warning(root: Path) -> None:
    limits(root, files="1024")
    found = of(root).descriptors()
    assert (found.state, "ulimit -Hn" in found.remedy) == (FindingState.WARN, True)
    limits(root, files="unlimited")
    assert of(root).descriptors().state is FindingState.OK


def test_no_descriptors_left_is_a_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise Unavailable("this process has fewer than 16 descriptors left (ulimit -n)")

    monkeypatch.setattr(host, "check_headroom", none_left)
    assert of(root).descriptors().state is FindingState.FAIL


def test_little_memory_of_host_or_container_is_a_warning(root: Path) -> None:
    assert of(root).memory().state is FindingState.OK
    write(root, "sys/fs/cgroup/memory.max", f"{2 << 30}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{1900 << 20}\n")
    found = of(root).memory()
    assert (found.state, "148 MiB under the limit of 2,048 MiB" in found.found) == (
        FindingState.WARN,
        True,
    )
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    assert of(root).memory().state is FindingState.OK
    write(root, "proc/meminfo", MEMINFO.format(available=100 << 10))
    assert of(root).memory().state is FindingState.WARN
    write(root, "proc/meminfo", "")
    assert of(root).memory().state is FindingState.SKIPPED


def test_limited_or_refused_shared_memory_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(root, space=str(4 << 30))
    found = of(root).shared_memory()
    assert (found.state, "4,096 MiB" in found.found) == (FindingState.WARN, True)

    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.pidfd_open", refused)
    assert of(root).shared_memory().state is FindingState.FAIL


@pytest.mark.parametrize(
    ("status", "unsynced"), [(0x40, True), (0x2040, True), (0x2001, False), (0x20, False)]
)
def test_unsynchronized_clock_is_read_from_the_kernel(
    monkeypatch: pytest.MonkeyPatch, status: int, unsynced: bool
) -> None:
    """The clock's state is the status field of `struct timex`, at byte 40 on 64-bit Linux."""

    def adjtimex(state: Any) -> int:
        assert state.raw[:4] == bytes(4), "the call would set the clock"
        struct.pack_into("@Iqqqqi", state, 0, 0, -1, -1, -1, -1, status)
        return 5

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=adjtimex))
    assert unsynchronised() is unsynced


def test_limit_of_locked_memory_is_a_warning_with_a_gpu_only(root: Path) -> None:
    limits(root, locked=str(8 << 20), locked_hard=str(8 << 20))
    assert of(root).locked_memory().state is FindingState.OK
    found = of(root, has_gpu=True).locked_memory()
    assert (found.state, found.found) == (
        FindingState.WARN,
        "8 MiB a process, it may ask for 8 MiB",
    )


def test_disabled_huge_pages_are_a_warning_where_a_node_runs(root: Path) -> None:
    write(root, SHMEM_ENABLED, "always within_size advise [never] deny force\n")
    assert of(root).huge_pages().state is FindingState.OK
    found = of(root, serves=True).huge_pages()
    assert (found.state, f"echo advise > /{SHMEM_ENABLED}" in found.remedy) == (
        FindingState.WARN,
        True,
    )
    assert of(root, has_gpu=True).huge_pages().state is FindingState.WARN
    write(root, SHMEM_ENABLED, "always within_size advise never [deny] force\n")
    assert of(root, serves=True).huge_pages().state is FindingState.WARN
    (root / SHMEM_ENABLED).unlink()
    assert of(root, serves=True).huge_pages().state is FindingState.SKIPPED


@pytest.mark.parametrize(
    ("unsynced", "state"),
    [(True, FindingState.WARN), (False, FindingState.OK), (None, FindingState.SKIPPED)],
)
def test_unsynchronized_clock_is_a_warning(
    root: Path, unsynced: bool | None, state: FindingState
) -> None:
    assert of(root, clock=lambda: unsynced).clock().state is state


def test_real_kernel_files_are_read() -> None:
    """The checks read this machine's real files, not only those that the tests write."""
    assert unsynchronised() in (True, False, None)
    real = Host()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = None if hard == resource.RLIM_INFINITY else hard
    assert real._limit("Max open files")[1] == wanted
    assert real.memory().state is not FindingState.SKIPPED
