"""Pages of an engine's host memory, on every wire and with every failure of the store."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stopping import stop
from waiting import PATIENT

from gpu_agent.host.page_table_tier import PageTableTier, TierConfig, row_pool, tier_config
from kvstore import Client, ClientConfig, Namespace
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tools.node_process import NodeProcess

ROWS, PAGE_NBYTES, PAGE_TOKENS = 12, 10_000, 64
Make = Callable[..., PageTableTier]


def random_memory(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, 256, (rows, PAGE_NBYTES), dtype=torch.uint8)


def chain(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest()[:16] for number in range(count)]


def patient(memory: torch.Tensor) -> TierConfig:
    """Return long timeouts, for tests that do not test timing."""
    return tier_config(memory, lookup_timeout_s=10, load_timeout_s=60)


def save_rows(pages: PageTableTier, hashes: list[bytes], rows: list[int]) -> list[int]:
    """Save the rows and return those whose pages were save_rows before."""
    already, job = pages.save(hashes, rows)
    assert job.done.result(60).dropped == 0
    assert job.gathered.done()
    return already


@pytest.fixture
def make(client: Client) -> Iterator[Make]:
    made: list[PageTableTier] = []

    def row_tier(memory: torch.Tensor) -> PageTableTier:
        namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
        made.append(PageTableTier(client, namespace, memory, patient(memory)))
        return made[-1]

    yield row_tier
    for pages in made:
        pages.close()
        assert pages.check() == []


def test_saved_pages_load_into_other_rows_only(make: Make, request: pytest.FixtureRequest) -> None:
    written, read = random_memory(), random_memory()
    before, hashes = read.clone(), chain(request.node.name, 5)
    assert save_rows(make(written), hashes, [7, 2, 11, 0, 4]) == []
    pages = make(read)
    assert pages.present(hashes) == [True] * 5
    assert pages.load(hashes, [3, 9, 1, 10, 5]).done.result(60).pages == 5
    assert torch.equal(read[[3, 9, 1, 10, 5]], written[[7, 2, 11, 0, 4]])
    others = [0, 2, 4, 6, 7, 8, 11]
    assert torch.equal(read[others], before[others])


def test_rows_of_stored_pages_are_returned_at_once_and_not_read(
    make: Make, request: pytest.FixtureRequest
) -> None:
    memory, hashes = random_memory(), chain(request.node.name, 4)
    pages = make(memory)
    assert save_rows(pages, hashes[:2], [0, 1]) == []
    first = memory[0].clone()
    memory[0] = 0  # the engine has reused the row
    assert save_rows(pages, hashes, [0, 1, 2, 3]) == [0, 1]
    assert save_rows(pages, hashes, [0, 1, 2, 3]) == [0, 1, 2, 3]
    pages.load(hashes, [8, 9, 10, 11]).done.result(60)
    assert torch.equal(memory[8:], torch.stack([first, *memory[1:4]]))


def test_returned_row_is_not_read_even_if_its_page_is_evicted(
    make: Make, request: pytest.FixtureRequest, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node loses a page between the lookup and the save, and the engine has reused its row."""
    memory, hashes = random_memory(), chain(request.node.name, 3)
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    pages = make(memory)
    save_rows(pages, hashes[:1], [0])
    submit = pages._agent.save

    def and_then(*arguments: Any) -> Any:
        client.remove(namespace, hashes[:1])
        memory[0] = 0
        return submit(*arguments)

    monkeypatch.setattr(pages._agent, "save", and_then)
    assert save_rows(pages, hashes, [0, 1, 2]) == [0]
    assert pages.present(hashes) == [False, True, True]


def test_missing_page_ends_a_load(
    make: Make, request: pytest.FixtureRequest, client: Client
) -> None:
    memory, hashes = random_memory(), chain(request.node.name, 4)
    pages = make(memory)
    save_rows(pages, hashes, [0, 1, 2, 3])
    client.remove(Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout), [hashes[2]])
    assert pages.present(hashes) == [True, True, False, True]
    before = memory.clone()
    assert pages.load(hashes, [4, 5, 6, 7]).done.result(60).pages == 2
    assert torch.equal(memory[[6, 7]], before[[6, 7]])


def test_concurrent_loads_of_one_page_into_one_row(
    make: Make, request: pytest.FixtureRequest
) -> None:
    memory, hashes = random_memory(), chain(request.node.name, 3)
    pages = make(memory)
    save_rows(pages, hashes, [0, 1, 2])
    jobs = [pages.load(hashes, [3, 4, 5]) for _ in range(8)]
    assert [job.done.result(60).pages for job in jobs] == [3] * 8
    assert torch.equal(memory[3:6], memory[:3])


@pytest.mark.parametrize("rows", [[1, 1], [0, -1], [0, ROWS], [0]])
def test_invalid_rows_are_refused_before_anything_moves(
    make: Make, request: pytest.FixtureRequest, rows: list[int]
) -> None:
    """This includes rows of save_rows pages, which would be returned to the engine."""
    pages, hashes = make(random_memory()), chain(request.node.name, 2)
    save_rows(pages, hashes, [2, 3])
    for move in (pages.save, pages.load):
        with pytest.raises(InvalidRequest, match="rows"):
            move(hashes, rows)


def test_found_pages_are_not_evicted_before_their_load() -> None:
    """Between the lookup and the load, enough new pages are saved to evict them all."""
    memory = random_memory(40)
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    wanted, others = chain("wanted", 4), chain("others", 24)
    with (
        NodeProcess("--ram-bytes", "256KiB", "--extent-bytes", "64KiB") as node,
        Client(ClientConfig(address=node.address, **PATIENT)) as client,
    ):
        pages = PageTableTier(client, namespace, memory, patient(memory))
        save_rows(pages, wanted, [0, 1, 2, 3])
        assert pages.present(wanted) == [True] * 4
        for some in (slice(12), slice(12, 24)):  # 4 of 20 slots are pinned
            save_rows(pages, others[some], list(range(4, 16)))
        before = memory[:4].clone()
        memory[:4] = 0
        assert pages.load(wanted, [0, 1, 2, 3]).done.result(60).pages == 4
        assert torch.equal(memory[:4], before)
        assert sum(pages.present(others)) < len(others)  # so that pages were evicted
        pages.close()


def test_head_of_a_pinned_chain_is_evicted_last() -> None:
    """When pins end, pages are ordered as if they had been read, so the end is evicted first."""
    memory = random_memory(40)
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    # At most half of a node can be pinned.
    held, others = chain("held", 6), chain("others", 18)
    with (
        NodeProcess("--ram-bytes", "256KiB", "--extent-bytes", "64KiB") as node,
        Client(ClientConfig(address=node.address, **PATIENT)) as client,
    ):
        pages = PageTableTier(
            client, namespace, memory, tier_config(memory, lookup_timeout_s=10, load_timeout_s=0.1)
        )
        save_rows(pages, held, list(range(6)))
        assert pages.present(held) == [True] * 6
        time.sleep(0.3)  # longer than load_timeout_s
        for number, other in enumerate(others):
            save_rows(pages, [other], [6 + number])
        left = client.lookup(namespace, held).present
        assert 0 < sum(left) < 6
        assert list(left) == sorted(left, reverse=True)
        pages.close()


def test_unreachable_node_is_a_miss() -> None:
    memory, hashes = random_memory(), chain("gone", 3)
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    with Client(ClientConfig(address="127.0.0.1:9")) as client:
        pages = PageTableTier(client, namespace, memory, tier_config(memory))
        before = memory.clone()
        assert pages.present(hashes) == [False] * 3
        already, save = pages.save(hashes, [0, 1, 2])
        assert (already, save.gathered.done(), save.done.result(0).dropped) == ([], True, 3)
        assert pages.load(hashes, [0, 1, 2]).done.result(60).pages == 0
        assert torch.equal(memory, before)
        pages.close()


@pytest.fixture(scope="module")
def stopped_node() -> Iterator[NodeProcess]:
    """Start a node that a test may stop if it resumes it."""
    with NodeProcess("--ram-bytes", "16MiB") as node:
        yield node


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_hung_node_costs_deadlines_and_settled_memory_is_not_accessed(
    wire: str, stopped_node: NodeProcess
) -> None:
    memory, hashes, node = random_memory(), chain(f"hung {wire}", 6), stopped_node
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    with Client(
        ClientConfig(address=node.address, wire=wire, timeout_s=4.0, connect_timeout_s=3.0)
    ) as client:
        pages = PageTableTier(
            client, namespace, memory, tier_config(memory, lookup_timeout_s=3.0, save_timeout_s=4.0)
        )
        save_rows(pages, hashes[:3], [0, 1, 2])
        stop(node.pid)
        try:
            load = pages.load(hashes[:3], [3, 4, 5])
            began = time.monotonic()
            pages.settle(load)
            assert time.monotonic() - began < 60
            memory[3:6] = 7  # the engine has reused the rows
            began = time.monotonic()
            assert pages.present(hashes) == [False] * 6
            already, save = pages.save(hashes, [0, 1, 2, 6, 7, 8])
            pages.settle(save)
            assert time.monotonic() - began < 60
            memory[6:9] = 9
        finally:
            os.kill(node.pid, signal.SIGCONT)
        assert (load.done.result(60).pages, already) == (0, [])
        time.sleep(0.5)
        assert (memory[3:6] == 7).all()
        assert (memory[6:9] == 9).all()
        deadline = time.monotonic() + 60
        while not any(pages.present(hashes[:3])) and time.monotonic() < deadline:
            time.sleep(0.1)
        # The reused rows were not save_rows under any key.
        assert pages.present(hashes) == [True] * 3 + [False] * 3
        pages.close()
        assert pages.check() == []


def test_concurrent_lookups_and_loads(make: Make, request: pytest.FixtureRequest) -> None:
    memory, hashes = random_memory(64), chain(request.node.name, 32)
    pages = make(memory)
    save_rows(pages, hashes, list(range(32)))
    wrong: list[int] = []

    def ask(number: int) -> None:
        if (
            pages.present(hashes) != [True] * 32
            or pages.load(hashes[number : number + 1], [32 + number]).done.result(60).pages != 1
        ):
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(memory[32:], memory[:32])
    assert (pages.active("load"), pages.active("save")) == (0, 0)


def test_limits_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.empty((100, 48 << 20), dtype=torch.uint8, device="meta")
    config = tier_config(memory)
    assert (config.staging_nbytes, config.pending_nbytes_max) == (48 << 20, 2 * memory.nbytes)
    assert (config.lookup_timeout_s, config.load_timeout_s) == (0.5, 1.0)
    monkeypatch.setenv("KVSTORE_AGENT_LOAD_TIMEOUT_S", "3")
    assert tier_config(memory).load_timeout_s == 3.0
    monkeypatch.setenv("KVSTORE_AGENT_LOAD_TIMEOUT_S", "61")
    with pytest.raises(ConfigError, match="load_timeout_s"):
        tier_config(memory)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(2, 8),
        torch.zeros(2, 8, dtype=torch.uint8)[:, :4],
        torch.zeros(2, 2, 4, dtype=torch.uint8),
    ],
)
def test_unsupported_memory_is_refused(memory: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="host memory"):
        row_pool(memory, 1)


def test_found_pages_are_pinned_for_two_seconds_at_most(
    client: Client, request: pytest.FixtureRequest
) -> None:
    """The limit holds even for long load timeouts, since pinned pages can not be evicted."""
    memory, hashes = random_memory(), chain(request.node.name, 3)
    namespace = Namespace("row-tier", row_pool(memory, PAGE_TOKENS).layout)
    pages = PageTableTier(
        client, namespace, memory, tier_config(memory, lookup_timeout_s=10, load_timeout_s=60)
    )
    save_rows(pages, hashes, [0, 1, 2])
    assert pages.present(hashes) == [True] * 3
    assert max(page.pin_ttl_ms for page in client.stat(namespace, hashes)) <= 2000
    pages.close()
