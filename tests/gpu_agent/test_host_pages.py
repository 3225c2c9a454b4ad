"""Pages of a host pool are saved and loaded by blocking calls."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import AgentConfig, KVPool
from gpu_agent.host.pages import HostPages
from gpu_agent.layouts.group import GroupView, pool_of
from kvstore import Client, ClientConfig, Namespace, prefix_hashes
from kvstore.errors import DeadlineExceeded
from kvstore.tools.node_process import NodeProcess

COUNT, TIMEOUT_S = 10, 5.0
HASHES = prefix_hashes(list(range(4 * COUNT)), 4)


def made_pool() -> KVPool:
    memory = torch.randint(0, 256, (32, 2, 3000), dtype=torch.uint8)
    return pool_of(4, GroupView("host", (0,), {"page": [memory]}, unit_tokens=4, space="page"))


def made_pages(client: Client) -> HostPages:
    pool = made_pool()
    return HostPages(
        client,
        Namespace(model=f"host-{uuid.uuid4()}", layout=pool.layout),
        pool,
        AgentConfig(workers=1),
        8,
    )


@pytest.fixture
def pages(client: Client) -> Iterator[HostPages]:
    pages = made_pages(client)
    yield pages
    assert pages.agent.check() == []
    pages.close(1.0)


def memory(pages: HostPages) -> torch.Tensor:
    assert pages.agent._pool is not None
    return pages.agent._pool.planes[0].bits


def test_saved_pages_are_loaded(pages: HostPages) -> None:
    source, target = torch.arange(COUNT), torch.arange(20, 20 + COUNT)
    assert pages.save(HASHES, source, TIMEOUT_S) == [True] * COUNT
    assert pages.save(HASHES, source, TIMEOUT_S) == [True] * COUNT
    assert pages.present(HASHES, TIMEOUT_S) == [True] * COUNT
    assert pages.load(HASHES, target, TIMEOUT_S) == [True] * COUNT
    assert torch.equal(memory(pages)[target], memory(pages)[source])


def test_shards_share_the_memory_for_staging(client: Client) -> None:
    """Regression: eight shards of heads took eight times the configured memory."""
    shards = [(made.layout, made) for made in (made_pool() for _ in range(8))]
    spaces = [(Namespace(f"{uuid.uuid4()}", layout), pool) for layout, pool in shards]
    config = AgentConfig(workers=1, staging_nbytes=96 * 6000)
    pages = HostPages(client, *spaces[0], config, 8, spaces[1:])
    assert [agent.config.staging_nbytes for agent in pages.agents] == [12 * 6000] * 8
    assert pages.save(HASHES, torch.arange(COUNT), TIMEOUT_S) == [True] * COUNT
    pages.close(1.0)


def test_load_ends_at_a_missing_page(pages: HostPages) -> None:
    pages.save(HASHES[:3] + HASHES[4:], torch.arange(COUNT - 1), TIMEOUT_S)
    before = memory(pages).clone()
    assert pages.load(HASHES, torch.arange(20, 20 + COUNT), TIMEOUT_S) == [True] * 3 + [False] * 7
    assert torch.equal(memory(pages)[23:], before[23:])
    assert torch.equal(memory(pages)[20:23], before[:3])


def test_flat_pages_equal_pool_pages(pages: HostPages) -> None:
    flat = [torch.randint(0, 256, (pages.page_nbytes,), dtype=torch.uint8) for _ in range(COUNT)]
    assert pages.put(HASHES, flat, TIMEOUT_S) == [True] * COUNT
    assert pages.load(HASHES, torch.arange(COUNT), TIMEOUT_S) == [True] * COUNT
    assert torch.equal(memory(pages)[:COUNT].reshape(COUNT, -1), torch.stack(flat))
    back = [torch.zeros(pages.page_nbytes, dtype=torch.uint8) for _ in range(COUNT)]
    assert pages.get(HASHES, back, TIMEOUT_S) == [True] * COUNT
    assert torch.equal(torch.stack(back), torch.stack(flat))


def test_flat_page_of_another_size_is_refused(pages: HostPages) -> None:
    short = [torch.zeros(pages.page_nbytes - 1, dtype=torch.uint8)]
    assert pages.put(HASHES[:1], short, TIMEOUT_S) == [False]
    assert pages.get(HASHES[:1], short, TIMEOUT_S) == [False]


def test_empty_calls_return_empty_lists(pages: HostPages) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert (
        pages.save([], none, TIMEOUT_S)
        == pages.load([], none, TIMEOUT_S)
        == pages.present([], TIMEOUT_S)
        == []
    )
    assert pages.put([], [], TIMEOUT_S) == pages.get([], [], TIMEOUT_S) == []


def test_without_a_node_calls_fail_at_once() -> None:
    with Client(ClientConfig(address="127.0.0.1:9", connect_timeout_s=0.2)) as client:
        pages = made_pages(client)
        start = time.monotonic()
        assert pages.save(HASHES, torch.arange(COUNT), 60.0) == [False] * COUNT
        assert pages.load(HASHES, torch.arange(COUNT), 60.0) == [False] * COUNT
        page = torch.zeros(pages.page_nbytes, dtype=torch.uint8)
        assert pages.put(HASHES[:1], [page], 60.0) == [False]
        assert time.monotonic() - start < 60.0
        pages.close(0.0)


def test_calls_end_by_their_own_deadlines(
    pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of a call, not the longer one of the agent, reaches the client."""
    timeouts: list[Any] = []

    def late(*args: Any, **more: Any) -> None:
        timeouts.append(more.get("timeout_s", args[-1]))
        raise DeadlineExceeded("late")

    for name in ("open", "lookup"):
        monkeypatch.setattr(pages._client, name, late)
    assert pages.save(HASHES, torch.arange(COUNT), 0.25) == [False] * COUNT
    assert pages.load(HASHES, torch.arange(COUNT), 0.5) == [False] * COUNT
    assert pages.present(HASHES, 0.75) == [False] * COUNT
    save, after_save, load, present = timeouts
    assert 0 < save <= 0.25
    assert after_save == pages.agent.config.lookup_timeout_s
    assert 0.25 < load <= 0.5
    assert present == 0.75


def test_full_node_reports_which_pages_are_stored() -> None:
    with (
        NodeProcess("--ram-bytes", "64KiB", "--extent-bytes", "64KiB") as node,
        Client(ClientConfig(address=node.address, wire="shm", **PATIENT)) as client,
    ):
        pages = made_pages(client)
        assert pages.save(HASHES[:2], torch.arange(2), TIMEOUT_S) == [True] * 2
        client.pin(pages.namespace, HASHES[:2], 60.0)
        stored = pages.save(HASHES, torch.arange(COUNT), TIMEOUT_S)
        assert stored == pages.present(HASHES, TIMEOUT_S)
        assert stored[:2] == [True, True]
        assert not all(stored)
        pages.close(1.0)
