"""The arena in huge pages, where the system gives them to shared memory (as root:
`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`), and without them."""

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
given = ENABLED.exists() and not any(
    f"[{word}]" in ENABLED.read_text() for word in ("never", "deny")
)


@pytest.fixture(params=[8 * HUGE, 3 * HUGE + 4096, 4096])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena(request.param)
    yield arena
    arena.close()


def test_a_client_sees_the_same_bytes_whatever_the_arena_is_made_of(arena: Arena) -> None:
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


@pytest.mark.skipif(not given, reason=f"{ENABLED} gives no huge pages to shared memory")
def test_the_arena_is_in_huge_pages(arena: Arena) -> None:
    arena.populate()
    assert arena.huge_nbytes == arena.nbytes // HUGE * HUGE


@pytest.mark.skipif(given, reason="huge pages are given here")
def test_without_huge_pages_it_says_so(arena: Arena) -> None:
    arena.populate()
    assert arena.huge_nbytes == 0


def test_a_kernel_that_knows_no_huge_pages_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20)  # EINVAL, as there
    arena = Arena(HUGE)
    arena.populate()
    assert huge_nbytes(0) == 0
    arena.close()


def test_status_and_metrics_tell(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node()
    monkeypatch.setattr(node.arena, "huge_nbytes", 6 << 20)
    assert connect(node).node_status().ram.huge_nbytes == 6 << 20
    assert (
        b"kvstore_ram_huge_bytes 6.291456e+06"
        in metrics_text(node.service)({}, HttpClient("me", ())).body()
    )
