"""Agents in the engine's process and in a process of their own behave the same."""

import dataclasses
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import AgentBackend, LocalBackend, ShardPool
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore import Client, ClientConfig, InvalidRequest, Namespace
from kvstore.keys import prefix_hashes
from kvstore.tools.node_process import NodeProcess

BLOCK, BLOCKS = 16, 64
WAIT_S = 60.0


class Rank:
    """Two cache groups, each with its own memory, and a backend for their agents.

    Blocks 0..31 stand for one engine, 32..63 for another one.
    """

    def __init__(self, kind: type[Any], address: str, device: str = "cpu", cell: int = 8) -> None:
        packed = torch.randint(
            0, 256, (BLOCKS, 2, 2, BLOCK, cell), dtype=torch.uint8, device=device
        )
        # All layers of a block are contiguous.
        self.views = [{f"layers.{i}": packed[:, i] for i in (0, 1)}]
        apart = torch.randn((2, BLOCKS, 1, BLOCK, 4), device=device).bfloat16()
        self.views.append({f"layers.{i}": apart[i] for i in (0, 1)})
        heads = torch.randint(0, 256, (BLOCKS, 4, BLOCK, cell), dtype=torch.uint8, device=device)
        self.views.append({"layers.0": heads})
        shards = [{"layers.0": heads[:, first : first + 2]} for first in (0, 2)]
        pools = [table_pool(views, BLOCKS, BLOCK) for views in [*self.views[:2], *shards]]
        self.places = [
            ShardPool(Namespace(f"homes {secrets.token_hex(8)}", pool.layout), pool)
            for pool in pools
        ]
        config = AgentConfig(staging_nbytes=1 << 20, pending_nbytes_max=1 << 22, hashers=2)
        self.home: AgentBackend = kind(self.places, ClientConfig(address=address), config)
        self.agents = self.home.agents(None)

    def done(self, *futures: Any) -> list[Any]:
        end = time.monotonic() + WAIT_S
        while not all(future.done() for future in futures):
            assert time.monotonic() < end
            self.home.poll()
            time.sleep(0.001)
        return [future.result() for future in futures]

    def save(self, group: int, keys: list[bytes], blocks: list[int]) -> Any:
        job = self.agents[group].save(keys, blocks)
        return self.done(job.gathered, job.done)[1]

    def load(self, group: int, keys: list[bytes], blocks: list[int]) -> Any:
        return self.done(self.agents[group].load(keys, blocks).done)[0]

    def content(self, views: int, blocks: list[int]) -> list[torch.Tensor]:
        return [view[blocks].clone() for view in self.views[views].values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def keys(count: int) -> list[bytes]:
    return prefix_hashes([secrets.randbelow(1 << 30) for _ in range(count * BLOCK)], BLOCK)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((LocalBackend, "cpu", 8), id="threads"),
        pytest.param((ProcessBackend, "cpu", 8), id="process"),
        pytest.param((ProcessBackend, "cuda", 8), id="process-gpu", marks=GPU),
        # Pages of 1 MiB, copied without a kernel.
        pytest.param((ProcessBackend, "cuda", 1 << 14), id="process-gpu-runs", marks=GPU),
    ],
)
def rank(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Rank]:
    kind, device, cell = request.param
    rank = Rank(kind, shared_node.address, device, cell)
    rank.save(0, keys(1), [1])  # once it has answered, the process is ready
    yield rank
    assert rank.home.check() == []
    rank.home.close()


@pytest.fixture
def store(shared_node: NodeProcess) -> Iterator[Client]:
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        yield client


def test_outage_is_logged_once_for_all_agents(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each cache group and each shard logged it, two dozen lines for some models."""
    rank = Rank(LocalBackend, "127.0.0.1:1")
    for group in range(4):
        assert rank.save(group, keys(1), [1]).dropped == 1
    rank.home.close()
    assert caplog.text.count("the store failed") == 1


def test_saved_blocks_load_into_other_blocks(rank: Rank) -> None:
    for group, views in ((0, 0), (1, 1)):
        chain, source, target = keys(5), [3, 9, 4, 7, 8], [40, 33, 63, 50, 41]
        result = rank.save(group, chain, source)
        assert (result.stored, result.existing, result.dropped, result.reason) == (5, 0, 0, None)
        before = rank.content(views, [*range(32), 34])
        loaded = rank.load(group, chain, target)
        assert (loaded.pages, loaded.loaded, loaded.error) == (5, 5, None)
        assert same(rank.content(views, target), rank.content(views, source))
        assert same(rank.content(views, [*range(32), 34]), before)


def test_shards_of_a_group_are_slices_of_its_blocks(rank: Rank) -> None:
    """Each shard has pages of its own and writes its heads only."""
    chain, before = keys(2), rank.content(2, [3, 4, 40, 41])
    for shard in (2, 3):
        assert rank.save(shard, chain, [3, 4]).stored == 2
    rank.load(3, chain, [40, 41])
    (view,) = rank.views[2].values()
    assert torch.equal(view[40:42, :2], before[0][2:, :2])
    assert torch.equal(view[40:42, 2:], before[0][:2, 2:])
    rank.load(2, chain, [40, 41])
    assert same(rank.content(2, [40, 41]), rank.content(2, [3, 4]))


def test_group_without_layers_has_no_agent(rank: Rank) -> None:
    ours = BlockRank(rank.home, writes=True, shards=[1, 0, 1, 2])
    agents = list(map(ours._agents_of, range(4)))
    assert list(map(len, agents)) == [1, 0, 1, 2]
    assert [agent.namespace for group in agents for agent in group] == [
        place.namespace for place in rank.places
    ]


def test_stored_pages_are_not_stored_again(rank: Rank) -> None:
    chain = keys(4)
    rank.save(0, chain[:2], [1, 2])
    result = rank.save(0, chain, [1, 2, 3, 4])
    assert (result.stored, result.existing, result.dropped) == (2, 2, 0)


def test_load_stops_at_the_first_missing_page(rank: Rank, store: Client) -> None:
    chain = keys(5)
    rank.save(0, chain, [1, 2, 3, 4, 5])
    store.remove(rank.places[0].namespace, [chain[3]])
    before = rank.content(0, [44, 45])
    loaded = rank.load(0, chain, [41, 42, 43, 44, 45])
    assert (loaded.pages, loaded.loaded, loaded.error) == (3, 3, None)
    assert same(rank.content(0, [41, 42, 43]), rank.content(0, [1, 2, 3]))
    assert same(rank.content(0, [44, 45]), before)


def test_concurrent_saves_and_loads_complete(rank: Rank) -> None:
    chains = [keys(4) for _ in range(8)]
    saves = [rank.agents[0].save(chain, range(2 * i, 2 * i + 4)) for i, chain in enumerate(chains)]
    assert all(result.stored == 4 for result in rank.done(*(job.done for job in saves)))
    # Load into separate blocks, as an engine does, since a GPU checks the contents afterwards.
    loads = [
        rank.agents[0].load(chain, range(32 + 4 * i, 36 + 4 * i)) for i, chain in enumerate(chains)
    ]
    assert all(result.pages == 4 for result in rank.done(*(job.done for job in loads)))
    for i in range(8):
        assert same(
            rank.content(0, [*range(32 + 4 * i, 36 + 4 * i)]),
            rank.content(0, [*range(2 * i, 2 * i + 4)]),
        )


def test_invalid_blocks_raise_at_once(rank: Rank) -> None:
    agent, chain = rank.agents[0], keys(2)
    with pytest.raises(InvalidRequest, match=r"block 64 is named; allowed are 0\.\.63"):
        agent.save(chain, [1, 64])
    with pytest.raises(InvalidRequest, match="block -1 is named"):
        agent.load(chain, [-1, 2])
    with pytest.raises(InvalidRequest, match="2 keys for 1 blocks"):
        agent.load(chain, [1])


def test_invalid_keys_are_not_stored(rank: Rank) -> None:
    """An agent in this process raises at once; one in another process reports the error later."""
    for wrong in ([keys(1)[0]] * 2, [b"abc", b"d" * 32]):
        try:
            result = rank.save(0, wrong, [1, 2])
        except InvalidRequest as error:
            reason = str(error)
        else:
            assert (result.stored, result.dropped) == (0, 2)
            reason = result.reason
        assert "twice" in reason or "3 bytes" in reason


def test_new_epoch_is_a_new_namespace_and_old_jobs_end(rank: Rank) -> None:
    chain, old = keys(3), rank.agents
    pending = old[0].save(chain, range(3))
    rank.agents = rank.home.agents(1 << 40)
    rank.home.retire(old)
    rank.home.wait([pending.done])
    assert rank.load(0, chain, [40, 41, 42]).pages == 0
    assert rank.save(0, chain, [1, 2, 3]).stored == 3
    assert rank.load(0, chain, [40, 41, 42]).pages == 3


def test_wait_returns_when_the_load_is_done(rank: Rank) -> None:
    chain = keys(3)
    rank.save(0, chain, [1, 2, 3])
    job = rank.agents[0].load(chain, [50, 51, 52])
    rank.home.wait([job.done])
    assert job.done.result().pages == 3


@pytest.mark.parametrize("kind", [LocalBackend])
def test_without_a_node_saves_are_dropped_and_loads_fail(kind: type[Any]) -> None:
    rank = Rank(kind, "127.0.0.1:9")
    result, loaded = rank.save(0, keys(2), [1, 2]), rank.load(0, keys(2), [40, 41])
    assert (result.stored, result.dropped) == (0, 2)
    assert (loaded.pages, bool(loaded.error)) == (0, True)
    rank.home.close()


def test_shard_pool_returns_the_namespace_of_an_epoch() -> None:
    place = Rank(LocalBackend, "127.0.0.1:9").places[0]
    assert place.at(None) is place.namespace
    assert place.at(7) == dataclasses.replace(place.namespace, epoch=7)
