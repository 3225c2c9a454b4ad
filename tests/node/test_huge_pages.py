"""The arena with and without huge pages.

To allow huge pages of shared memory, run as root:

`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_nodes import Connect, StartNode

from kvstore.sync import Event
from kvstore.transports.mapped_memory import ArenaMap
from node.memory.arena import Arena, huge_nbytes
from node.serving.http_server import HttpClient
from node.serving.metrics import metrics_text

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE = 2 << 20
available = ENABLED.exists() and not any(
    f"[{word}]" in ENABLED.read_text() for word in ("never", "deny")
)


@pytest.fixture(params=[8 * HUGE, 3 * HUGE + 4096, 4096])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena(request.param)
    yield arena
    arena.close()


def test_client_sees_the_same_bytes_with_any_page_size(arena: Arena) -> None:
    arena.populate()
    theirs = ArenaMap(arena.fd, arena.nbytes)
    theirs.populate(Event())
    for place in range(0, arena.nbytes, 4096):
        arena.view(place, 8)[:] = place.to_bytes(8, "little")
    assert all(
        theirs.memory[place : place + 8] == place.to_bytes(8, "little")
        for place in range(0, arena.nbytes, 4096)
    )
    theirs.depopulate()
    (last,) = theirs.views([arena.nbytes - 4096], [8])
    assert last == (arena.nbytes - 4096).to_bytes(8, "little")


@pytest.mark.skipif(not available, reason=f"{ENABLED} gives no huge pages to shared memory")
def test_the_arena_is_in_huge_pages(arena: Arena) -> None:
    arena.populate()
    assert arena.huge_nbytes == arena.nbytes // HUGE * HUGE


@pytest.mark.skipif(available, reason="huge pages are available here")
def test_arena_without_huge_pages_reports_zero(arena: Arena) -> None:
    arena.populate()
    assert arena.huge_nbytes == 0


def test_arena_works_on_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20)  # EINVAL, as on such a kernel
    arena = Arena(HUGE)
    arena.populate()
    assert huge_nbytes(0) == 0
    arena.close()


def test_status_and_metrics_report_huge_pages(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node()
    monkeypatch.setattr(node.arena, "huge_nbytes", 6 << 20)
    assert connect(node).node_status().ram.huge_nbytes == 6 << 20
    assert (
        b"kvstore_ram_huge_bytes 6.291456e+06"
        in metrics_text(node.service)({}, HttpClient("me", ())).body()
    )
