"""R24: with the allocator `shm` the host pool is a memfd, and pages are copied only once.

Keys go to the node in messages; pages are copied directly between the pool and the node's memory.
"""

import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import PAGE, buffers, fill, mha, mla, page_bytes

from gpu_agent.host.slot_copies import SlotCopies

Make = Callable[..., Any]
TOKENS = list(range(12 * PAGE))
SLOTS = torch.arange(len(TOKENS))


@pytest.mark.parametrize("pool", [mha, mla])
def test_loaded_pages_are_visible_to_another_process(
    engine: Make, pool: Callable[..., Any]
) -> None:
    writer, reader = (
        engine(pool(allocator="shm"), allocator="shm"),
        engine(pool(allocator="shm"), allocator="shm"),
    )
    fill(writer.host)
    writer.backup(TOKENS, SLOTS)
    assert reader.prefetch(TOKENS)[0] == len(TOKENS)
    (fd,) = reader.host.allocator.fds
    # Any process of the same user can open the memfd.
    other = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY)
    nbytes = buffers(reader.host)[0].untyped_storage().nbytes()
    with mmap.mmap(other, 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:nbytes] == bytes(
            reader.host.kv_buffer.view(torch.uint8).contiguous().numpy().tobytes()
        )
    os.close(other)


def test_page_is_copied_once_between_pool_and_node(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(mha(allocator="shm"), allocator="shm", wire="shm")
    fill(made.host)
    backend = made.backend
    pool = backend._pages["kv"].agent._pool

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a page was copied through a buffer")

    monkeypatch.setattr(backend._client, "put", refuse)
    monkeypatch.setattr(backend._client, "get", refuse)
    moved: list[int] = []

    def watched(name: str) -> Callable[..., None]:
        inner = getattr(SlotCopies, name)

        def move(self: Any, pool_: Any, units: Any, pages: Any, *args: Any, **more: Any) -> None:
            assert pool_ is pool
            assert (
                pool_.planes[0].bits.untyped_storage().data_ptr()
                == made.host.kv_buffer.untyped_storage().data_ptr()
            )
            arena = backend._client._fan_out.nodes.only._connection.wire.arena
            start = torch.frombuffer(arena.memory, dtype=torch.uint8, count=1).data_ptr()
            assert all(start <= page.data_ptr() < start + arena.memory.nbytes for page in pages)
            moved.append(len(pages))
            inner(self, pool_, units, pages, *args, **more)

        return move

    for name in ("gather", "scatter"):
        monkeypatch.setattr(SlotCopies, name, watched(name))
    made.backup(TOKENS, SLOTS)
    tokens, target = made.prefetch(TOKENS)
    assert (tokens, moved) == (len(TOKENS), [12, 12])
    assert page_bytes(made.host, target) == page_bytes(made.host, SLOTS)
