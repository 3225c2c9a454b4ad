"""Tensors of any size as chunks, through a real node: complete, or a miss."""

import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.objects import tensor_loads
from gpu_agent.objects.store import ObjectStore
from gpu_agent.objects.tensor_loads import TensorLoads
from gpu_agent.objects.tensors import (
    CHUNK_NBYTES,
    ChunkPool,
    TensorSaves,
    TensorSpec,
    chunk_layout,
    chunk_names,
    header,
    read_header,
    scope_of,
)
from kvstore import Client, ClientConfig, Namespace, threads
from kvstore.tools.node_process import NodeProcess

WIDTH = 1000  # a row has 2,000 bytes
WAIT_S = 60.0
CONFIG = AgentConfig(
    staging_nbytes=1 << 20, lookup_timeout_s=30.0, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S
)


def memory(chunks: int) -> torch.Tensor:
    return torch.full((chunks, CHUNK_NBYTES), 7, dtype=torch.uint8)


def tensor(seed: int, rows: int, width: int = WIDTH) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((rows, width), generator=random).to(torch.bfloat16)


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    with Client(
        ClientConfig(address=shared_node.address, timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:
        yield client


@pytest.fixture
def store(client: Client) -> Iterator[ObjectStore]:
    objects = ObjectStore(client, CONFIG)
    yield objects
    objects.close()


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(uuid.uuid4().hex, chunk_layout(), revision="1")


@pytest.fixture
def save(
    store: ObjectStore, namespace: Namespace
) -> Iterator[Callable[[str, torch.Tensor], TensorSaves]]:
    saves = TensorSaves(store, namespace, memory(8))

    def save(identifier: str, value: torch.Tensor) -> TensorSaves:
        saves.save(identifier, value)
        end = time.monotonic() + WAIT_S
        while saves.pending:
            assert time.monotonic() < end
            time.sleep(0.001)
        return saves

    yield save
    saves.close()


class Reader:
    """Loads and the pool that they fill."""

    def __init__(self, store: ObjectStore, namespace: Namespace, chunks: int = 8) -> None:
        self.now = 0.0
        self.pool = ChunkPool(memory(chunks))
        self.loads = TensorLoads(store, namespace, self.pool, 1.0, lambda: self.now)

    def fetch(self, identifier: str, rows: int, kind: str = "image") -> torch.Tensor | None:
        """Return the tensor as an engine would copy it; None for a miss."""
        self.loads.begin(identifier, rows, kind)
        end = time.monotonic() + WAIT_S
        while self.loads.pending(identifier):
            assert time.monotonic() < end
            self.loads.poll()
        assert self.loads.check() == []
        return self.copy(identifier, rows)

    def copy(self, identifier: str, rows: int) -> torch.Tensor | None:
        spec = self.loads.find(identifier, rows)
        if spec is None:
            return None
        _, slots = self.loads.content(identifier)
        value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        flat = value.view(-1).view(torch.uint8)
        for slot, (at, start, nbytes) in zip(slots, spec.pieces(), strict=True):
            flat[at : at + nbytes] = self.pool.rows[slot, start : start + nbytes]
        return value


@pytest.fixture
def reader(store: ObjectStore, namespace: Namespace) -> Reader:
    return Reader(store, namespace)


def test_tensors_of_all_sizes_come_back(save: Callable[..., TensorSaves], reader: Reader) -> None:
    """One chunk, two, an exact fit, several, and another dtype and width of the same kind."""
    fit = torch.arange((CHUNK_NBYTES - 512) // 4, dtype=torch.float32).view(-1, 4)
    values = [tensor(1, 3), tensor(2, 700), fit, tensor(3, 1400), tensor(4, 5, 64).float()]
    for number, value in enumerate(values):
        save(f"image {number}", value)
    for number, value in [*enumerate(values), *reversed(list(enumerate(values)))]:
        found = reader.fetch(f"image {number}", len(value))
        assert found is not None
        assert torch.equal(found, value)
        assert found.dtype == value.dtype
    assert reader.loads.stats.fetched == 5


def test_any_text_is_a_name(save: Callable[..., TensorSaves], reader: Reader) -> None:
    """Regression: half of a surrogate pair raised in the engine's scheduler."""
    save("\ud800", tensor(3, 4))
    assert reader.fetch("\ud800", 4) is not None


def test_end_of_the_last_chunk_has_nothing_of_earlier_tensors(
    save: Callable[..., TensorSaves], reader: Reader
) -> None:
    save("turned", tensor(1, 600).T)
    found = reader.fetch("turned", WIDTH)
    assert found is not None
    assert torch.equal(found, tensor(1, 600).T)
    spec, slots = reader.loads.content("turned")
    *_, (_, start, nbytes) = spec.pieces()
    assert not reader.pool.rows[slots[-1], start + nbytes :].any()


def test_chunks_of_two_tensors_of_one_name_never_meet(
    save: Callable[..., TensorSaves], reader: Reader, client: Client, namespace: Namespace
) -> None:
    """The first chunk of one was evicted, then a tensor of another shape got the name."""
    save("mine", tensor(1, 1200))
    first, *_ = chunk_names(scope_of(namespace), "mine", None)
    assert client.remove(namespace, [first.prefix_hash]) == [True]
    other = tensor(2, 1200).view(torch.float16)
    save("mine", other)
    found = reader.fetch("mine", 1200)
    assert found is not None
    assert torch.equal(found, other)


def test_known_width_needs_one_round_trip(
    save: Callable[..., TensorSaves],
    reader: Reader,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save("first", tensor(1, 1200))
    save("second", tensor(2, 1300))
    reader.fetch("first", 1200)
    calls: list[int] = []
    get = store.get
    monkeypatch.setattr(
        store, "get", lambda names, views: calls.append(len(names)) or get(names, views)
    )  # type: ignore[func-returns-value]
    reader.loads.begin("second", 1300, "image")
    assert reader.loads.find("second", 1300) is None, "nothing says that it has come"
    assert reader.fetch("second", 1300) is not None
    assert calls == [3]


def test_missing_or_incomplete_tensor_is_a_miss(
    save: Callable[..., TensorSaves], reader: Reader, client: Client, namespace: Namespace
) -> None:
    value = tensor(1, 1200)
    save("lost", value)
    names = chunk_names(scope_of(namespace), "lost", TensorSpec("bfloat16", (1200, WIDTH)))
    assert client.remove(namespace, [names[1].prefix_hash]) == [True]
    assert reader.fetch("lost", 1200) is None
    assert reader.fetch("never", 10) is None
    assert reader.loads.stats.missing == 2
    assert reader.pool.free == len(reader.pool)
    save("lost", value)
    assert reader.fetch("lost", 1200) is None, "it was looked up again at once"
    reader.now += tensor_loads.MISS_S
    assert reader.fetch("lost", 1200) is not None


def test_tensor_with_other_rows_is_not_used(
    save: Callable[..., TensorSaves], reader: Reader
) -> None:
    """A client's own identifier may name another image elsewhere."""
    save("mine", tensor(1, 100))
    assert reader.fetch("mine", 101) is None
    assert reader.loads.stats.wrong == 1
    reader.now += tensor_loads.MISS_S
    assert reader.fetch("mine", 100) is not None
    assert reader.copy("mine", 101) is None


def test_header_of_another_tensor_is_refused() -> None:
    spec = TensorSpec("bfloat16", (3, 5))
    chunk = header("a", spec)
    assert read_header("a", memoryview(chunk)) == spec
    assert read_header("b", memoryview(chunk)) is None
    assert read_header("a", memoryview(bytes(512))) is None
    assert read_header("a", memoryview(header("a", TensorSpec("unknown", (3,))))) is None


def test_full_pool_evicts_idle_tensors_only(
    save: Callable[..., TensorSaves], store: ObjectStore, namespace: Namespace
) -> None:
    for name in "abc":
        save(name, tensor(ord(name), 700))  # two chunks each
    reader = Reader(store, namespace, chunks=4)
    assert reader.fetch("a", 700) is not None
    assert reader.fetch("b", 700) is not None
    reader.loads.pin("a")
    assert reader.fetch("c", 700) is None, "it evicted a tensor that a request waits for"
    reader.now += 1.5
    assert reader.fetch("c", 700) is not None
    assert reader.copy("b", 700) is None
    reader.loads.pin("c")
    assert reader.fetch("b", 700) is None
    assert reader.loads.stats.no_space == 2
    kept = reader.copy("a", 700)
    assert kept is not None
    assert torch.equal(kept, tensor(ord("a"), 700))
    reader.loads.unpin("a")
    assert reader.fetch("b", 700) is not None


def test_tensor_that_is_asked_for_again_is_not_evicted_for_the_next(
    save: Callable[..., TensorSaves], store: ObjectStore, namespace: Namespace
) -> None:
    """Regression: a request's second output took the place of its first one, found a moment ago."""
    for name in "ab":
        save(name, tensor(ord(name), 700))  # two chunks each
    reader = Reader(store, namespace, chunks=3)
    assert reader.fetch("a", 700) is not None
    reader.now += 1.5
    reader.loads.begin("a", 700, "image")
    assert reader.fetch("b", 700) is None
    assert reader.copy("a", 700) is not None
    reader.now += 1.5
    assert reader.fetch("b", 700) is not None


def test_engine_waits_no_longer_than_its_patience(reader: Reader, store: ObjectStore) -> None:
    reader.loads.begin("slow", 10, "image")
    reader.now = 1.5
    assert not reader.loads.pending("slow")
    assert (reader.loads.stats.late, reader.loads.find("slow", 10)) == (1, None)


def test_saves_beyond_the_buffers_are_dropped(store: ObjectStore, namespace: Namespace) -> None:
    saves = TensorSaves(store, namespace, memory(2))
    saves.save("large", tensor(1, 1200))
    saves.save("empty", torch.empty((0, 4)))
    saves.save("complex", torch.zeros(4, dtype=torch.complex64))
    saves.close()
    assert (saves.stats.dropped, saves.pending) == (3, 0)


@pytest.mark.parametrize("part", ["copy", "thread"])
def test_save_that_can_not_begin_keeps_no_buffer(
    store: ObjectStore, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Regression: a failed copy ended the engine; without a thread the buffers stayed taken."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    saves = TensorSaves(store, namespace, memory(2))
    monkeypatch.setattr(*((saves, "_copy") if part == "copy" else (threads, "start_thread")), fail)
    for number in range(3):
        saves.save(f"image {number}", tensor(number, 3))
    assert saves.stats.dropped == 3
    assert saves.pending == 0
    saves.close()


def test_store_that_is_away_costs_nothing_but_misses(namespace: Namespace) -> None:
    config = ClientConfig(address="127.0.0.1:1", connect_timeout_s=0.2)
    with Client(config) as client:
        store = ObjectStore(client, AgentConfig(load_timeout_s=2.0, save_timeout_s=2.0))
        saves = TensorSaves(store, namespace, memory(4))
        saves.save("a", tensor(1, 700))
        reader = Reader(store, namespace)
        assert reader.fetch("a", 700) is None
        saves.close()
        store.close()
        assert (saves.stats.failed, saves.pending) == (1, 0)
