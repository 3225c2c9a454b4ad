"""Random requests on two of SGLang's schedulers with small caches, under faults.

Requests are aborted and retracted, pages vanish between lookup and load or are damaged, saves fail
and the node hangs. Every request returns correct values or none, every stored page matches its key,
a fresh engine reads all pages, and no lock, slot or row leaks. SEEDS=1000 runs longer; KVSTORE_SEED
sets the first seed.
"""

import json
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import storm_engine
from client_faults import ClientFaults
from harness import hashes, options, server_arguments, start_node
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from stopping import stop
from storm_engine import StormEngine
from storm_models import MODELS, Model
from storms import storm_seeds

import gpu_agent.engines.sglang_weights as weights
from kvstore import Client, ClientConfig, PutOutcome
from kvstore.tools.node_process import NodeProcess

REQUESTS = 70
ENDS_S = 60.0
HASTY = {
    "lookup_timeout_s": 0.2,
    "load_timeout_s": 0.3,
    "save_timeout_s": 0.5,
    "backoff_s_max": 0.1,
}
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 30.0, "save_timeout_s": 30.0}
# The models of each way into the store; the linker refuses the others (test_linker.py).
KINDS = [*(("hicache", model) for model in MODELS), ("linker", "mha"), ("linker", "mla")]


@pytest.fixture(scope="module")
def storm_node() -> Iterator[NodeProcess]:
    with start_node("--ram-bytes", "16MiB", "--extent-bytes", "1MiB") as node:
        yield node


class Fleet:
    """Start engines of one kind and model on one node."""

    def __init__(self, kind: str, model: type[Model], address: str, seed: int) -> None:
        self.kind, self.model, self.rng = kind, model, random.Random(seed)
        self.faults = ClientFaults(address, random.Random(seed + 1))
        self.engines: list[StormEngine] = []
        self._address, self._revision = address, f"{seed}-{uuid.uuid4()}"

    def start(self, **more: Any) -> StormEngine:
        model = self.model()
        config = options(
            self._address, revision=self._revision, prefetch_threshold=model.page, **more
        )
        if self.kind == "hicache":
            with storm_engine.server("hicache", model.page, json.dumps(config)) as arguments:
                made = StormEngine(model, arguments, self.rng)
        else:
            made = StormEngine(model, None, self.rng, lambda params: self._linker(params, more))
        self.engines.append(made)
        return made

    def _linker(self, params: Any, more: dict[str, Any]) -> Any:
        arguments = server_arguments(self._revision)
        config = {
            "linker": "KVStoreLinker",
            "linker_module_path": "gpu_agent.engines.sglang_linker",
            "linker_extra_config": {"address": self._address, "revision": self._revision, **more},
        }
        return create_unified_cache_linker(
            arguments,
            params,
            backend="dynamic",
            config=config,
            components={ComponentType.FULL},
            forward_stream=None,
        )

    def client_of(self, engine: StormEngine) -> Client:
        store = engine.linker or engine.cache.cache_controller.storage_backend
        found: Client = store._client
        return found

    def namespaces_of(self, engine: StormEngine) -> dict[str, Any]:
        """Return the namespaces of an engine's pools, by the pool's name."""
        if engine.linker:
            return {"kv": engine.linker._agent.namespace}
        pages = engine.cache.cache_controller.storage_backend._pages
        return {name: pool.namespace for name, pool in pages.items()}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.faults.close()


@pytest.fixture
def fleet(
    storm_node: NodeProcess,
    kind: tuple[str, str],
    storm_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Fleet]:
    def no_server() -> Any:
        raise ValueError("the options name the weights")

    monkeypatch.setattr(weights, "get_server_args", no_server)
    monkeypatch.setattr(weights, "model_config", lambda _: {"model_type": "llama"})
    way, model = kind[0], MODELS[kind[1]]
    made = Fleet(way, model, storm_node.address, storm_seed)
    with storm_engine.server(way, model.page):  # the arguments that running engines read
        yield made
        made.close()


def prompt(rng: random.Random, scale: int) -> list[int]:
    """Return a prompt of one of a few families, which share prefixes, with its own end."""
    family, length = rng.choice((3, 7, 11)), rng.randrange(1, 100 * scale)
    tail = [rng.randrange(5, 500) for _ in range(rng.choice((0, 0, 3, 9)))]
    return [(family * i) % 500 + 5 for i in range(length)] + tail


def run(engine: StormEngine) -> None:
    """Run the engine until all requests and all transfers to and from the store have ended."""
    end = time.monotonic() + ENDS_S
    while not settled(engine):
        engine.step()
        time.sleep(0.0005)
        assert time.monotonic() < end, f"still {engine.waiting}, {engine.running}, {engine.chunked}"


def settled(engine: StormEngine) -> bool:
    """Return whether the engine has no requests and no transfers left."""
    cache = engine.cache
    if not engine.idle:
        return False
    if engine.linker is not None:
        return not cache.linker.pending_offloads
    under_way = (
        cache.ongoing_write_through,
        cache.ongoing_backup,
        cache.ongoing_prefetch,
        cache.ongoing_load_back,
    )
    controller = cache.cache_controller
    queues = (
        controller.ack_prefetch_queue,
        controller.host_mem_release_queue,
        controller.prefetch_hit_queue,
    )
    return (
        not any(under_way)
        and all(queue.empty() for queue in queues)
        and not controller.prefetch_tokens_occupied
    )


def disturb(rng: random.Random, node: NodeProcess, engine: StormEngine) -> None:
    requests = [*engine.waiting, *engine.running, *([engine.chunked] if engine.chunked else [])]
    what = rng.random()
    if what < 0.25 and requests:
        engine.abort(rng.choice(requests))
    elif what < 0.4 and engine.running:
        engine.retract(rng.choice(engine.running))
    elif what < 0.7:
        slots = engine.model.slots
        engine.evict(rng.randrange(slots), rng.randrange(2 * slots))
    elif what < 0.74:
        stop(node.pid)
        try:
            for _ in range(rng.randrange(30)):
                engine.step()
                time.sleep(0.002)
        finally:
            os.kill(node.pid, signal.SIGCONT)


def storm(fleet: Fleet, node: NodeProcess) -> None:
    rng, engines = (
        fleet.rng,
        [fleet.start(**HASTY, wire=wire) for wire in fleet.rng.sample(("shm", "bulk", "grpc"), 2)],
    )
    for engine in engines:
        fleet.faults.watch(fleet.client_of(engine))
    for number in range(REQUESTS):
        engine = rng.choice(engines)
        engine.submit(f"r{number}", prompt(rng, fleet.model.scale), rng.randrange(1, 30))
        for _ in range(rng.randrange(12)):
            rng.choice(engines).step()
            time.sleep(rng.choice((0, 0, 0.002)))
        disturb(rng, node, engine)
    for engine in engines:
        run(engine)


def wrong_pages(fleet: Fleet, address: str) -> tuple[dict[str, int], list[str]]:
    """Return the number of stored pages of each pool and the keys of those with wrong bytes."""
    known: dict[bytes, list[int]] = {}
    for engine in fleet.engines:
        known |= engine.known_pages()
    counts, wrong = {}, []
    with Client(ClientConfig(address=address, timeout_s=20.0)) as client:
        for pool, namespace in fleet.namespaces_of(fleet.engines[0]).items():
            keys = [page.prefix_hash for page in client.list_pages(namespace)]
            buffers = [bytearray(namespace.layout.page_nbytes) for _ in keys]
            there = client.get(namespace, keys, buffers) if keys else []
            # Damaged pages are misses.
            pages = [
                (key, bytes(page))
                for key, page, hit in zip(keys, buffers, there, strict=True)
                if hit
            ]
            counts[pool] = len(pages)
            model = fleet.engines[0].model
            wrong += [
                f"{pool} {key.hex()}"
                for key, page in pages
                if model.wrong_page(pool, page, known[key])
            ]
    return counts, wrong


@pytest.mark.parametrize("storm_seed", storm_seeds(3))
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_stored_pages_after_a_storm_are_correct(fleet: Fleet, storm_node: NodeProcess) -> None:
    storm(fleet, storm_node)
    fleet.faults.share = 0.0
    stormy = list(fleet.engines)
    for engine in stormy:
        assert engine.wrong == []
        assert len(engine.ended) == len(engine.everything), "a request did not end"
    assert sum(fleet.faults.struck.values()) > fleet.faults.struck["none"] > 0
    _, wrong = wrong_pages(fleet, storm_node.address)
    assert wrong == []
    for engine in stormy:
        assert engine.leftovers() == []

    # One engine saves the missing pages, then another one reads all of them.
    sequences = [
        [*req.origin_input_ids, *req.output_ids] for engine in stormy for req in engine.everything
    ]
    for _ in range(2):
        fresh = fleet.start(**PATIENT)
        for number, tokens in enumerate(sequences):
            fresh.submit(f"again-{number}", tokens, 1)
            if number % 4 == 0:
                run(fresh)
        run(fresh)
        assert fresh.wrong == []
        assert set(fresh.ended.values()) == {"finished"}
        assert fresh.leftovers() == []
    assert fresh.counts["from the store"] > 0
    stored, wrong = wrong_pages(fleet, storm_node.address)
    assert all(stored.values()), stored
    assert wrong == []


POOLS = [("mha", "kv"), ("mla", "kv"), ("swa", "swa"), ("dsa", "indexer"), ("mamba", "mamba")]


@pytest.mark.parametrize("storm_seed", [0])
@pytest.mark.parametrize(
    ("kind", "pool"), [(("hicache", model), pool) for model, pool in POOLS], ids=str
)
def test_swapped_pages_are_noticed(fleet: Fleet, storm_node: NodeProcess, pool: str) -> None:
    """Verify the check of the storms: pages of one prompt under the names of another."""
    writer = fleet.start(**PATIENT)
    size = fleet.model.page
    length = 12 * fleet.model.scale * 4
    prompts = [[start, *range(5, 4 + length)] for start in (5, 6)]
    for number, tokens in enumerate(prompts):
        writer.submit(f"first-{number}", tokens, 1)
    run(writer)
    assert writer.wrong == []
    with Client(ClientConfig(address=storm_node.address, timeout_s=20.0)) as client:
        namespace = fleet.namespaces_of(writer)[pool]
        stored = {page.prefix_hash for page in client.list_pages(namespace)}
        names = [[bytes.fromhex(key) for key in hashes(tokens, size)] for tokens in prompts]
        swapped = [pair for pair in zip(*names, strict=True) if stored.issuperset(pair)]
        assert swapped
        for pair in swapped:
            pages = [bytearray(namespace.layout.page_nbytes) for _ in pair]
            assert client.get(namespace, pair, pages) == [True, True]
            assert client.remove(namespace, pair) == [True, True]
            outcomes = client.put(namespace, pair[::-1], pages)
            assert outcomes == [PutOutcome.STORED] * 2
    reader = fleet.start(**PATIENT)
    for number, tokens in enumerate(prompts):
        reader.submit(f"again-{number}", [*tokens, 9], 1)
    run(reader)
    assert reader.counts["from the store"] > 0
    assert reader.wrong != []
