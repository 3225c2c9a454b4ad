"""Pages are sent directly from an engine's pool and received there, without a copy.

The same bytes are transferred as by a copy, in the named slots only. Failures on the way are
misses, and nothing is written after a call has returned.
"""

import math
import os
import random
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from relays import WAIT_S, Relay
from relays import relayed as relayed
from stopping import stop
from waiting import wait_until

from gpu_agent import Agent, AgentConfig, KVPool, TorchTransfer
from gpu_agent.host import slot_copies
from gpu_agent.host.pages import HostPages
from gpu_agent.host.slot_copies import SlotCopies, SlotSegments
from gpu_agent.layouts.group import GroupView, pool_of
from kvstore import Client, ClientConfig, Namespace, prefix_hashes
from kvstore.buffers import copy_segments
from kvstore.tools.node_process import NodeProcess
from kvstore.transports import bulk

COUNT, SLOTS = 8, 32
RUN = 48 << 10  # bytes of K and of V, so that a page stalls within one
SECRET = "5a" * 32
HASHES = prefix_hashes(list(range(4 * COUNT)), 4)
SOURCE, TARGET = torch.randperm(16)[:COUNT], 16 + torch.randperm(16)[:COUNT]
TIME_S = 0.5  # of a call that will fail


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


def one_unit(*tensors: torch.Tensor) -> KVPool:
    """Return a pool of pages of 4 tokens; each tensor is `[pages, ...]`."""
    planes = {f"plane{number}": [tensor] for number, tensor in enumerate(tensors)}
    return pool_of(4, GroupView("host", (0,), planes, unit_tokens=4, space="page"))


def k_and_v(run: int = RUN) -> KVPool:
    """Return a pool with K and V half the pool apart, as in `page_first`."""
    return one_unit(random_bytes(2, SLOTS, run).transpose(0, 1))


def segments() -> KVPool:
    """Return a pool with K and V of other sizes in separate memory, and gaps between K's pages."""
    return one_unit(random_bytes(SLOTS, 5000)[:, 700:4000], random_bytes(SLOTS, 1, 333))


def by_layer() -> KVPool:
    """Return a pool with a run per layer, of K and of V, as in `layer_first`."""
    memory = random_bytes(2, 3, SLOTS * 4, 2, 5, dtype=torch.bfloat16)
    return one_unit(memory.unflatten(2, (SLOTS, 4)).permute(2, 0, 1, 3, 4, 5))


def units() -> KVPool:
    """Return a pool whose pages are two units of 2 tokens, in two layers."""
    memory = [random_bytes(2 * SLOTS, 6, 7, dtype=torch.int16).transpose(1, 2) for _ in range(2)]
    return pool_of(4, GroupView("host", (0, 1), {"kv": memory}, unit_tokens=2, space="block"))


def behind() -> KVPool:
    """Return a pool with an offset from the memory's start and a dimension of size one."""
    return one_unit(random_bytes(SLOTS + 3, 2, 1, 40)[3:, :, :, 8:])


POOLS: dict[str, Callable[[], KVPool]] = {
    "k_and_v": k_and_v,
    "segments": segments,
    "by_layer": by_layer,
    "units": units,
    "behind": behind,
}


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_copies, "PIECE_NBYTES_MIN", 1)


def table_of(pool: KVPool, count: int) -> Any:
    space = next(iter(pool.spaces.values()))
    return pool.unit_table(
        torch.randperm(space.slots)[: count * pool.layout.page_tokens // space.unit_tokens], count
    )


def check_pieces(pool: KVPool) -> None:
    table = table_of(pool, 5)
    expected = list(torch.zeros(5, pool.layout.page_nbytes, dtype=torch.uint8))
    TorchTransfer().gather(pool, table, expected, None)
    found = SlotSegments(pool).pieces(pool, table)
    assert found is not None
    assert [b"".join(pieces) for pieces in found] == [bytes(page.numpy()) for page in expected]
    whole = [plane.bits.clone() for plane in pool.planes]
    pages = list(random_bytes(5, pool.layout.page_nbytes))
    TorchTransfer().scatter(pool, table, pages, None)
    scattered = [plane.bits.clone() for plane in pool.planes]
    for plane, before in zip(pool.planes, whole, strict=True):
        plane.bits.copy_(before)
    for pieces, page in zip(found, pages, strict=True):
        copy_segments(pieces, [memoryview(page.numpy())])
    assert all(
        torch.equal(plane.bits, other) for plane, other in zip(pool.planes, scattered, strict=True)
    )


@pytest.mark.parametrize("name", POOLS)
def test_pieces_equal_the_references_pages(name: str) -> None:
    check_pieces(POOLS[name]())


def test_pools_of_any_strides_equal_the_references_pages(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        shape = [rng.randrange(2, 6) for _ in range(rng.randrange(1, 5))]
        memory = random_bytes(
            8, *shape, dtype=rng.choice([torch.uint8, torch.bfloat16, torch.int32])
        )
        order = rng.sample(range(1, len(shape) + 1), len(shape))
        tensor = memory.permute(0, *order)
        tensor = (
            tensor[..., rng.randrange(tensor.shape[-1] - 1) :] if rng.random() < 0.5 else tensor
        )
        check_pieces(one_unit(*[tensor, random_bytes(8, 9)][: rng.randrange(1, 3)]))


def test_small_pieces_are_copied_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not searched one by one either: a page of a transposed pool has millions."""
    monkeypatch.setattr(slot_copies, "PIECE_NBYTES_MIN", 1000)
    for run, wanted in ((1000, True), (999, False)):
        pool = k_and_v(run)
        assert (SlotSegments(pool).pieces(pool, table_of(pool, 1)) is not None) is wanted
    monkeypatch.setattr("itertools.product", None)
    pool = one_unit(torch.empty(2, 1 << 11, 1 << 11, dtype=torch.uint8).transpose(1, 2))
    assert SlotSegments(pool).pieces(pool, table_of(pool, 1)) is None


def test_pages_of_another_pool_are_copied() -> None:
    pool, other = k_and_v(), k_and_v()
    assert SlotSegments(pool).pieces(other, table_of(other, 1)) is None
    assert SlotCopies().pieces(pool, table_of(pool, 1)) is None


class Host:
    """Save the first half of a pool, and load into its poisoned second half."""

    def __init__(
        self, client: Client, pool: KVPool, model: str = "", key_id: str = "", parts: int = 3
    ) -> None:
        """Make the pool's pages, with calls that are split into `parts`."""
        self.client, self.pool = client, pool
        namespace = Namespace(model or f"pieces-{uuid.uuid4()}", pool.layout, key_id=key_id)
        config = AgentConfig(
            workers=1, staging_nbytes=max(4096, math.ceil(COUNT / parts) * pool.layout.page_nbytes)
        )
        self.pages = HostPages(client, namespace, pool, config, COUNT)
        for plane in pool.planes:
            plane.bits[16:] = 0x5A

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        pages = torch.empty((len(slots), self.pool.layout.page_nbytes), dtype=torch.uint8)
        TorchTransfer().gather(
            self.pool, self.pool.unit_table(slots, len(slots)), list(pages), None
        )
        return pages

    def others(self) -> torch.Tensor:
        """Return the pages in slots that no load writes."""
        return self.at(torch.tensor([slot for slot in range(SLOTS) if slot not in TARGET.tolist()]))

    def close(self) -> None:
        assert self.pages.agent.check() == []
        self.pages.close(1.0)


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a page was copied through the buffer")

    monkeypatch.setattr(SlotCopies, "gather", refuse)
    monkeypatch.setattr(SlotCopies, "scatter", refuse)


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
@pytest.mark.parametrize("name", ["k_and_v", "segments", "by_layer", "behind"])
def test_zero_copy_save_is_loaded_without_a_copy(
    shared_node: NodeProcess, no_copy: None, wire: str, name: str
) -> None:
    with Client(ClientConfig(address=shared_node.address, wire=wire, timeout_s=WAIT_S)) as client:
        host = Host(client, POOLS[name]())
        others = host.others()
        assert host.pages.save(HASHES, SOURCE, WAIT_S) == [True] * COUNT
        assert host.pages.load(HASHES, TARGET, WAIT_S) == [True] * COUNT
        assert torch.equal(host.at(TARGET), host.at(SOURCE))
        assert torch.equal(host.others(), others)
        host.close()


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_sealed_pages_are_not_copied(shared_node: NodeProcess, no_copy: None, wire: str) -> None:
    config = ClientConfig(address=shared_node.address, wire=wire, timeout_s=WAIT_S, page_key=SECRET)
    with Client(config) as client:
        host = Host(client, k_and_v(), key_id=client.key_id)
        assert host.pages.save(HASHES, SOURCE, WAIT_S) == [True] * COUNT
        assert host.pages.load(HASHES, TARGET, WAIT_S) == [True] * COUNT
        assert torch.equal(host.at(TARGET), host.at(SOURCE))
        with Client(replace(config, page_key="6b" * 32)) as stranger:
            assert stranger._page_keys is not None
            stranger._page_keys.key_id = client.key_id  # pretend to have the key
            foreign = Host(stranger, k_and_v(), host.pages.namespace.model, client.key_id)
            assert foreign.pages.load(HASHES, TARGET, WAIT_S) == [False] * COUNT
            assert stranger.stats.forged_pages
            foreign.close()
        host.close()


@pytest.mark.parametrize("first", ["pieces", "copies"])
def test_pieces_and_copies_are_interchangeable(
    client: Client, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    hosts = {}
    for name, minimum in (("pieces", 1), ("copies", 1 << 40)):
        monkeypatch.setattr(slot_copies, "PIECE_NBYTES_MIN", minimum)
        model = next((host.pages.namespace.model for host in hosts.values()), "")
        hosts[name] = Host(client, k_and_v(), model)
    writer, reader = hosts.pop(first), *hosts.values()
    assert writer.pages.save(HASHES, SOURCE, WAIT_S) == [True] * COUNT
    assert reader.pages.load(HASHES, TARGET, WAIT_S) == [True] * COUNT
    assert torch.equal(reader.at(TARGET), writer.at(SOURCE))
    writer.close()
    reader.close()


@pytest.mark.parametrize(("skip_tokens", "layers"), [(0, False), (1, False), (0, True), (6, True)])
def test_skipped_units_are_kept_and_layers_are_reported(
    shared_node: NodeProcess, skip_tokens: int, layers: bool
) -> None:
    slots = random_bytes(32, RUN)
    pool = pool_of(4, GroupView("host", (0,), {"kv": [slots]}))
    source, target = torch.arange(8), torch.arange(16, 24)
    with Client(ClientConfig(address=shared_node.address, wire="bulk", timeout_s=WAIT_S)) as client:
        config = AgentConfig(workers=1, staging_nbytes=8 * RUN)
        agent = Agent(
            client,
            Namespace(f"pieces-{uuid.uuid4()}", pool.layout),
            pool,
            config,
            SlotSegments(pool),
        )
        assert agent.save(HASHES[:2], source).done.result(WAIT_S).stored == 2
        expected, placed = slots.clone(), list[int]()
        expected[target[skip_tokens:]] = slots[source[skip_tokens:]]
        report = (lambda layer, _: placed.append(layer)) if layers else None
        result = agent.load(HASHES[:2], target, skip_tokens, placed=report).done.result(WAIT_S)
        assert (result.pages, placed) == (2, [0] if layers else [])
        assert torch.equal(slots, expected)
        agent.close()


# ---- failures -------------------------------------------------------------------------------


@pytest.fixture
def stored(relayed: tuple[Client, Relay], no_copy: None) -> Iterator[Host]:
    host = Host(relayed[0], k_and_v())
    assert host.pages.save(HASHES, SOURCE, WAIT_S) == [True] * COUNT
    yield host
    relayed[1].go_on.set()
    host.close()


PAGE = 2 * RUN


def test_damaged_page_ends_the_load(stored: Host, relayed: tuple[Client, Relay]) -> None:
    others = stored.others()
    relayed[1].pass_on(PAGE + RUN + RUN // 2, "flip")  # in V of the second page
    assert stored.pages.load(HASHES, TARGET, WAIT_S) == [True] + [False] * (COUNT - 1)
    assert torch.equal(stored.at(TARGET[:1]), stored.at(SOURCE[:1]))
    assert not torch.equal(stored.at(TARGET[1:2]), stored.at(SOURCE[1:2])), (
        "the damaged page should be in its slot"
    )
    assert torch.equal(stored.others(), others)
    assert stored.client.stats.corrupt_pages == 1
    assert stored.pages.load(HASHES, TARGET, WAIT_S) == [True] * COUNT
    assert torch.equal(stored.at(TARGET), stored.at(SOURCE))


@pytest.mark.parametrize("nbytes", [RUN // 2, PAGE + RUN + RUN // 2, 4 * PAGE + RUN // 3])
def test_stalled_page_is_a_miss_by_the_deadline_and_not_written_later(
    stored: Host, relayed: tuple[Client, Relay], nbytes: int
) -> None:
    """Parts of 3 pages that arrived before count, but nothing of the stalled part."""
    relayed[1].pass_on(nbytes, "stall")
    came = nbytes // PAGE // 3 * 3
    assert stored.pages.load(HASHES, TARGET, TIME_S) == [True] * came + [False] * (COUNT - came)
    assert relayed[1].stalled.is_set()
    assert torch.equal(stored.at(TARGET[:came]), stored.at(SOURCE[:came]))
    poisoned = torch.full((1,), 0x5A, dtype=torch.uint8)
    assert not torch.equal(stored.at(TARGET), poisoned.expand(COUNT, PAGE)), (
        "the load did not stall in the middle of a page"
    )
    for plane in stored.pool.planes:  # the engine has reused the slots
        plane.bits[16:] = 0
    relayed[1].go_on.set()
    threading.Event().wait(0.3)  # in which the rest would be received
    assert not stored.at(TARGET).any()


def test_connection_closed_within_a_page_is_a_miss(
    stored: Host, relayed: tuple[Client, Relay]
) -> None:
    relayed[1].pass_on(PAGE + RUN // 2, "close")
    others = stored.others()
    assert stored.pages.load(HASHES, TARGET, WAIT_S) == [False] * COUNT
    assert torch.equal(stored.others(), others)


def test_abandoned_save_reads_no_slot_later_and_stores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is stopped in the middle of the save, and its slots are reused before it resumes."""
    send, stopped = bulk._send_pages, list[bool]()
    with NodeProcess("--ram-bytes", "128MiB", "--extent-bytes", "64MiB") as node:
        config = ClientConfig(
            address=node.address, wire="bulk", timeout_s=WAIT_S, backoff_s_max=0.1
        )
        with Client(config) as client:
            host = Host(client, k_and_v(2 << 20), parts=1)
            assert host.pages.save(HASHES[:1], SOURCE[:1], WAIT_S) == [True]

            def stopping(*arguments: Any) -> list[bytes]:
                if not stopped:
                    stop(node.pid)
                    stopped.append(True)
                return send(*arguments)

            monkeypatch.setattr(bulk, "_send_pages", stopping)
            try:
                assert host.pages.save(HASHES, SOURCE, TIME_S) == [False] * COUNT
                assert stopped
                for plane in host.pool.planes:
                    plane.bits[:] = 0
            finally:
                os.kill(node.pid, signal.SIGCONT)
            wait_until(lambda: any(host.pages.present(HASHES, WAIT_S)))
            assert host.pages.present(HASHES, WAIT_S) == [True] + [False] * (COUNT - 1)
            host.close()


def test_slots_of_a_save_are_not_freed_while_they_are_sent(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(ClientConfig(address=shared_node.address, wire="bulk", timeout_s=WAIT_S)) as client:
        host, ordered, given_back = Host(client, k_and_v()), threading.Event(), list[bool]()
        put = client.put

        def watched(*arguments: Any, **named: Any) -> Any:
            assert ordered.wait(WAIT_S)
            outcomes = put(*arguments, **named)
            given_back.append(job.gathered.done())
            return outcomes

        monkeypatch.setattr(client, "put", watched)
        job = host.pages.agent.save(HASHES, SOURCE)
        ordered.set()
        assert job.done.result(WAIT_S).stored == COUNT
        assert given_back == [False] * 3
        assert job.gathered.done()
        host.close()
