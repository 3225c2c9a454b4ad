"""Copying and touching arena memory releases the GIL, so that serving threads run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import OthersRun

from node.memory.arena import Arena, _limit_files, _limit_nbytes, _used_nbytes

HALF = 8 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2 * HALF)
    yield arena
    arena.close()


def test_threads_run_while_a_page_is_moved(arena: Arena, others_run: OthersRun) -> None:
    arena.view(0, 5)[:] = b"moved"
    assert others_run(lambda: arena.copy(0, HALF, HALF))
    assert arena.view(HALF, 5) == b"moved"


def test_threads_run_while_the_arena_is_populated(arena: Arena, others_run: OthersRun) -> None:
    assert others_run(arena.populate)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "5"}, 5),  # in a container
        ("0::/system.slice/vllm.service", {"system.slice/vllm.service/memory.max": "6"}, 6),
        ("0::/a/job/step", {"a/job/step/memory.max": "max", "a/job/memory.max": "7"}, 7),
        ("3:cpu:/x\n2:blkio,memory:/job", {"memory/job/memory.limit_in_bytes": "8"}, 8),
        ("2:memory:/docker/of/host", {"memory/memory.limit_in_bytes": "9"}, 9),
        ("", {"memory.max": "max"}, None),
    ],
)
def test_limits_of_all_groups_above_a_process_count(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    """Regression: in a job or a service with a limit the kernel killed the node, or its engine."""
    (tmp_path / "cgroup").write_text(f"{groups}\n" if groups else "")
    for name, limit in limits.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    found = [_limit_nbytes(one) for one in _limit_files(str(tmp_path), str(tmp_path / "mounted"))]
    assert min(found) == (expected or sys.maxsize)


def test_memory_of_files_does_not_count_as_used(tmp_path: Path) -> None:
    """Else an engine that uses most of its container would get a node that the kernel ends."""
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        assert _used_nbytes(tmp_path / f"memory.{limit}") == 0
        (tmp_path / f"memory.{used}").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\nactive_file 30\n")
        assert _used_nbytes(tmp_path / f"memory.{limit}") == 870
        with (tmp_path / "memory.stat").open("a") as stat:
            stat.write("total_inactive_file 500\ntotal_active_file 60\n")
        assert _used_nbytes(tmp_path / f"memory.{limit}") == 440
        (tmp_path / "memory.stat").unlink()
