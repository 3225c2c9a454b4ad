"""vLLM's own scheduler from the official wheel with our encoder connector and a real node."""

import os
import random
import resource
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from encoder_engine import CHUNK_NBYTES, EncoderEngine, RequestStatus, adapter
from restartable_node import RestartableNode
from stopping import stop
from waiting import wait_until

from gpu_agent.identity.vllm import check_encoder
from gpu_agent.objects.tensors import TensorSpec, chunk_names, header, scope_of
from kvstore.client import Client
from kvstore.errors import ConfigError
from kvstore.tools.node_process import NodeProcess

pytestmark = pytest.mark.filterwarnings("default")

Make = Callable[..., EncoderEngine]
IMAGES = [("cat", 40), ("dog", 300), ("sun", 129)]
NAMES = [name for name, _ in IMAGES]
FIRST, SEEDS = int(os.environ.get("KVSTORE_SEED") or 1), int(os.environ.get("SEEDS") or 4)


@pytest.fixture
def make_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler_node: NodeProcess
) -> Iterator[Make]:
    """Return a function that makes engines that share a tenant; `store` has options."""
    tenant, made = uuid.uuid4().hex, []

    def make(store: dict[str, Any] | None = None, warm: bool = True, **options: Any) -> Any:
        values = {
            "address": scheduler_node.address,
            "tenant": tenant,
            "lookup_timeout_s": 30.0,
            "load_timeout_s": 30.0,
            "save_timeout_s": 30.0,
            "timeout_s": 30.0,
            "buffer_nbytes": "16MiB",
            **(store or {}),
        }
        engine = EncoderEngine(tmp_path / "model", monkeypatch, values, **options)
        made.append(engine)
        if warm:
            engine.warm()
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("empty_steps", [False, True])
def test_second_engine_computes_no_encoder(
    make_encoder: Make, ranks: int, overlap: bool, empty_steps: bool
) -> None:
    options: dict[str, Any] = {"overlap": overlap, "empty_steps": empty_steps}
    assert make_encoder(**options).ask(*IMAGES) == NAMES
    engine = make_encoder(ranks=ranks, **options)
    assert engine.ask(*IMAGES) == []
    assert all(worker.computed in ([], ["warm"]) for worker in engine.workers)


def test_outputs_in_the_engines_own_cache_are_not_fetched(make_encoder: Make) -> None:
    engine = make_encoder()
    engine.ask(*IMAGES)
    fetched = engine.ours._loads.stats.fetched
    assert engine.ask(*IMAGES, *IMAGES) == []
    assert engine.ours._loads.stats.fetched == fetched


def test_first_request_does_not_wait_for_workers_to_map_the_memory(make_encoder: Make) -> None:
    make_encoder().ask(*IMAGES)
    engine = make_encoder(warm=False)
    assert engine.ours._loads is None
    assert engine.ask(IMAGES[0]) == ["cat"]
    engine.warm()
    assert engine.ask(IMAGES[1]) == []


def test_memory_that_one_worker_can_not_map_is_never_used(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on another host must not end the engine."""
    make_encoder().ask(*IMAGES)
    engine = make_encoder(ranks=2, warm=False)
    worker = engine.workers[1].connector._worker
    monkeypatch.setattr(worker, "_map", lambda _, *rest: type(worker)._map(worker, "/no", *rest))
    engine.warm()
    assert engine.ask(*IMAGES) == NAMES
    assert engine.ours._mapped == {(0, 0): True, (1, 0): False}


def test_other_memory_at_the_same_path_is_never_used(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host or in another container the path may name a file of another process."""
    make_encoder().ask(*IMAGES)
    engine = make_encoder(warm=False)
    worker, other = engine.workers[0].connector._worker, os.memfd_create("other")
    os.ftruncate(other, 64 << 20)
    path = f"/proc/{os.getpid()}/fd/{other}"
    monkeypatch.setattr(worker, "_map", lambda _, *rest: type(worker)._map(worker, path, *rest))
    engine.warm()
    assert engine.ask(*IMAGES) == NAMES
    assert engine.ours._mapped == {(0, 0): False}
    os.close(other)


def test_worker_without_memory_for_the_mapping_loads_nothing(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the exception ended the engine, or on a GPU the thread without a report."""
    engine = make_encoder(warm=False)

    def fail(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_rows", fail)
        engine.warm()
    assert engine.ours._mapped == {(0, 0): False}
    assert engine.ask(*IMAGES) == NAMES


def test_limit_on_files_ends_the_start_with_its_fix(make_encoder: Make) -> None:
    """Regression: without memory for the mapping a step raised."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
    try:
        with pytest.raises(ConfigError, match="buffer_nbytes"):
            make_encoder(warm=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_request_waits_once_for_the_outputs_of_all_its_chunks(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each chunk of a prompt had a deadline of its own."""
    engine = make_encoder({"load_timeout_s": 1.0}, batch_tokens=128)
    monkeypatch.setattr(engine.ours, "_loads", LoadsForEver())
    clock = [0.0]
    monkeypatch.setattr(adapter, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    request = engine.add("r", [(f"image {number}", 100) for number in range(9)])
    ready = []
    for chunk, now in enumerate([1.0, 1.6, 2.1, 9.0, 9.6, 9.9]):
        clock[0] = now
        ready.append(engine.ours.ensure(request, 0 if chunk < 3 else 105 * chunk))
    assert ready == [False, False, True, True, True, True]
    engine.ours.finished("r")
    assert engine.ours._waits == {}
    monkeypatch.undo()
    engine.abort("r")


class LoadsForEver:
    """Loads that never end."""

    stats = ""

    def begin(self, identifier: str, rows: int, kind: str) -> None: ...

    def poll(self) -> None: ...

    def find(self, identifier: str, rows: int) -> None: ...

    def pending(self, identifier: str) -> bool:
        return True


def test_nothing_is_loaded_before_the_last_worker_has_mapped_the_memory(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a worker page-locks the memory beside its steps."""
    make_encoder().ask(*IMAGES)
    engine = make_encoder(ranks=2, warm=False)
    worker, late = engine.workers[1].connector._worker, []
    monkeypatch.setattr(worker, "_map", lambda *memory: late.append(memory))
    engine.ask(("warm", 1))
    wait_until(lambda: late)
    assert engine.ask(IMAGES[0]) == ["cat"]
    type(worker)._map(worker, *late[0])
    engine.ask(("next", 1))
    assert engine.ask(*IMAGES[1:]) == []


def test_output_that_left_the_engines_own_cache_is_fetched_again(make_encoder: Make) -> None:
    make_encoder().ask(*IMAGES)
    engine = make_encoder(cache_rows=350)
    assert engine.ask(IMAGES[1]) + engine.ask(IMAGES[2]) + engine.ask(IMAGES[1]) == []


def test_output_of_another_shape_is_computed(make_encoder: Make) -> None:
    """Two engines give one identifier, a client's `uuid`, to images of different sizes."""
    make_encoder().ask(("mine", 100))
    engine = make_encoder()
    assert engine.ask(("mine", 101)) == ["mine"]
    assert engine.ours._loads.stats.wrong == 1


def test_name_of_two_sizes_in_one_request_is_never_loaded(make_encoder: Make) -> None:
    """Regression: the first image got the rows of the second.

    vLLM ends the request when it comes to the second.
    """
    make_encoder().ask(("mine", 101), ("other", 100))
    engine = make_encoder(batch_tokens=64, cache_rows=150)
    assert engine.ask(("mine", 101)) + engine.ask(("other", 100)) == []
    assert engine.ask(("mine", 100), ("mine", 101)) == ["mine"]


def test_foreign_or_lost_chunks_are_misses(make_encoder: Make) -> None:
    writer = make_encoder()
    writer.ask(*IMAGES)
    namespace = writer.workers[0].connector._worker._namespace
    scope, spec = scope_of(namespace), TensorSpec("float16", (300, 4096))
    with Client(writer.workers[0].connector._worker._close[2].config) as client:
        lost = chunk_names(scope, "dog", spec)[2].prefix_hash
        first = chunk_names(scope, "cat", None)[0].prefix_hash
        assert client.remove(namespace, [lost, first]) == [True, True]
        foreign = header("sun", spec).ljust(CHUNK_NBYTES, b"x")
        client.put(namespace, [first], [foreign])
    assert make_encoder().ask(*IMAGES) == ["cat", "dog"]


def test_full_buffers_are_computed_and_later_used_again(make_encoder: Make) -> None:
    """Two chunks of host memory, and a prompt that needs seven."""
    make_encoder().ask(*IMAGES)
    engine = make_encoder({"buffer_nbytes": "2MiB"})
    computed = engine.ask(*IMAGES)
    assert "dog" in computed  # three chunks
    assert "cat" not in computed
    assert engine.ours._loads.stats.no_space > 0
    make_encoder().ask(("one", 40), ("two", 200))
    assert engine.ask(("one", 40)) + engine.ask(("two", 200)) == []


def test_producer_stores_and_consumer_loads(make_encoder: Make) -> None:
    assert make_encoder(role="ec_producer").ask(*IMAGES) == NAMES
    consumer = make_encoder(role="ec_consumer")
    assert consumer.ask(*IMAGES) == []
    assert consumer.ask(("new", 9)) == ["new"]
    assert make_encoder().ask(("new", 9)) == ["new"], "a consumer stored"


def test_orders_of_a_lost_step_are_given_again(make_encoder: Make) -> None:
    """Model runner V1 drops the orders of a step that computes nothing.

    The scheduler counts the output as cached, so a later request would end the engine.
    """
    make_encoder().ask(*IMAGES)
    engine = make_encoder()
    orders = engine.scheduler.ec_connector.build_connector_meta  # type: ignore[union-attr]
    lost: list[Any] = []

    def lose(output: Any) -> Any:
        found = orders(output)
        if found.loads and not lost:
            lost.append(found)
            engine.lose_loads = True
        return found

    engine.scheduler.ec_connector.build_connector_meta = lose  # type: ignore[union-attr]
    assert engine.ask(*IMAGES) == []
    assert lost
    assert set(engine.workers[0].cache) >= set(NAMES)
    engine.ask(("next", 1))
    assert engine.ours._loads.pinned == 0


def test_output_freed_before_a_worker_copied_it_is_unpinned() -> None:
    """vLLM frees an output while the steps that ordered its load are lost: none comes again."""
    unpinned: list[str] = []
    rank, spec = (0, 0), TensorSpec("float32", (1,))
    scheduler: Any = object.__new__(adapter._Scheduler)
    order = adapter.LoadOrder(1, "cat", spec, [0])
    scheduler._running = {1: adapter._Load(order, {rank}, step=3, freed=True)}
    scheduler._loads = SimpleNamespace(unpin=unpinned.append)
    scheduler._namespace, scheduler._mapped = None, {rank: True}

    def report(step: int, copying: set[int]) -> None:
        scheduler.reported({rank: adapter.RankReport(True, step, set(), copying, None)})

    report(2, set())  # the order may still be on its way
    report(3, {1})  # the copy runs
    assert unpinned == []
    report(3, set())
    assert (unpinned, scheduler._running) == (["cat"], {})


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_node_that_goes_away_delays_by_one_deadline(
    make_encoder: Make, tmp_path: Path, how: signal.Signals
) -> None:
    node = RestartableNode(tmp_path / "node")
    try:
        store = {"address": node.address, "load_timeout_s": 0.5, "timeout_s": 0.5}
        store |= {"lookup_timeout_s": 0.5, "save_timeout_s": 0.5, "connect_timeout_s": 0.5}
        make_encoder(store).ask(*IMAGES)
        engine = make_encoder(store)
        (stop if how is signal.SIGSTOP else lambda pid: os.kill(pid, how))(node.pid)
        assert engine.ask(*IMAGES) == NAMES
        assert engine.longest_step_s < 0.4, "a step waited for the node"
        os.kill(node.pid, signal.SIGKILL)
    finally:
        node.end()


def test_request_without_any_input_ends_alone(make_encoder: Make) -> None:
    """A consumer accepts embeddings without a tensor; here neither store nor client has it."""
    make_encoder().ask(("stored", 40))
    engine = make_encoder()
    nothing = {"image_embeds": SimpleNamespace(data=None)}
    engine.ours._fields = SimpleNamespace(fields_for=lambda modality: set())
    engine.add("hit", [("stored", 40)], nothing)
    engine.add("miss", [("lost", 40)], nothing)
    engine.add("media", [("other", 40)], {"pixels": SimpleNamespace(data=1)})
    engine.run()
    ends = {name: str(request.status).split(".")[-1] for name, request in engine.requests.items()}
    assert ends["miss"] == "FINISHED_ERROR"
    assert {ends["hit"], ends["media"]} == {"FINISHED_LENGTH_CAPPED"}
    assert engine.computed[-1:] == ["other"]


NOTHING = {"image_embeds": SimpleNamespace(data=None)}


def test_output_without_any_input_is_not_evicted_by_the_next_of_its_request(
    make_encoder: Make,
) -> None:
    """Regression: it was found, then evicted, and the encoder got no input: vLLM's worker ends."""
    make_encoder().ask(("one", 100), ("two", 200))
    engine = make_encoder({"buffer_nbytes": "2MiB"}, batch_tokens=64)
    engine.ours._fields = SimpleNamespace(fields_for=lambda modality: set())
    clock = [time.monotonic()]
    engine.ours._loads._clock = lambda: clock[0]
    engine.add("early", [("one", 100)])
    engine.scheduler.schedule()
    engine.abort("early")
    wait_until(lambda: engine.ours._loads.poll() or engine.ours._loads.find("one", 100))
    clock[0] += 60.0
    engine.add("late", [("one", 100), ("two", 200)], NOTHING)
    engine.run(60.0)
    assert "one" not in engine.computed


def test_output_without_any_input_that_this_pass_evicted_is_loaded(make_encoder: Make) -> None:
    """Regression: it was counted on in vLLM's own cache, and the encoder got no input."""
    make_encoder().ask(("one", 100), ("two", 100), ("three", 100))
    engine = make_encoder(cache_rows=200)
    engine.ours._fields = SimpleNamespace(fields_for=lambda modality: set())
    for name in ("two", "one", "three"):
        assert engine.ask((name, 100)) == []
    engine.add("evicts", [("two", 100)])
    engine.add("needs", [("one", 100)], NOTHING)
    engine.run(60.0)
    assert engine.computed == ["warm"]
    assert engine.requests["needs"].status == RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"model_config.multimodal_config": None}, "text only"),
        ({"model_config.is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config.multimodal_config.mm_processor_cache_gb": 0}, "order of their arrival"),
        ({"lora_config": SimpleNamespace(enable_tower_connector_lora=True)}, "LoRA"),
        ({"weight_transfer_config": object()}, "weights that change"),
        ({"model_config.enable_sleep_mode": True}, "sleep mode"),
        ({"model_config.multimodal_config.mm_encoder_attn_dtype": "fp8"}, "measures for itself"),
        ({"parallel_config.distributed_executor_backend": "external_launcher"}, "every rank"),
    ],
)
def test_engine_whose_outputs_have_no_name_does_not_start(
    make_encoder: Make, facts: dict[str, Any], reason: str
) -> None:
    config = make_encoder(warm=False).config
    check_encoder(config)
    for path, value in facts.items():
        *parts, last = path.split(".")
        owner: Any = config
        for part in parts:
            owner = getattr(owner, part)
        fields = {name: getattr(owner, name) for name in dir(owner) if name[0] != "_"}
        changed: Any = SimpleNamespace(**{**fields, last: value})
        for part in reversed(parts):
            *above, _ = parts[: parts.index(part) + 1]
            outer: Any = config
            for name in above:
                outer = getattr(outer, name)
            fields = {name: getattr(outer, name) for name in dir(outer) if name[0] != "_"}
            changed = SimpleNamespace(**{**fields, part: changed})
        with pytest.raises(ConfigError, match=reason):
            check_encoder(changed)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"buffer_nbytes": "many"}, "buffer_nbytes"),
        ({"buffer_nbytes": 5}, "1MiB to 64GiB"),
        ({"bufer_nbytes": 5}, "unknown option"),
    ],
)
def test_wrong_option_is_named(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        adapter.encoder_options(values)


@pytest.mark.parametrize(
    "change",
    [
        {"multimodal": {"mm_processor_kwargs": {"num_crops": 4}}},
        {"multimodal": {"mm_encoder_attn_backend": "TORCH_SDPA"}},
        {"store": {"salt": "x"}},
        {"store": {"epoch": 3}},
        {"store": {"revision": "2"}},
    ],
)
def test_other_processing_or_weights_never_share(
    make_encoder: Make, change: dict[str, Any]
) -> None:
    make_encoder().ask(IMAGES[0])
    assert make_encoder(**change).ask(IMAGES[0]) == ["cat"]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_storm(make_encoder: Make, tmp_path: Path, seed: int) -> None:
    """Random requests, aborts, lost chunks and a node that is killed; every step is checked."""
    rng, met = random.Random(seed), Counter[str]()
    node = RestartableNode(tmp_path / "node")
    store = {"address": node.address, "load_timeout_s": 1.0, "save_timeout_s": 2.0}
    store |= {"timeout_s": 1.0, "connect_timeout_s": 0.5, "lookup_timeout_s": 0.5}
    images = [(f"image {number}", rng.randrange(1, 400)) for number in range(30)]
    engines = [
        make_encoder(
            {**store, "buffer_nbytes": rng.choice(["3MiB", "8MiB", "32MiB"])},
            ranks=rng.choice([1, 2]),
            cache_rows=rng.choice([400, 700, 4096]),
            blocks=rng.choice([80, 120, 512]),
            batch_tokens=rng.choice([64, 256, 1024]),
            overlap=rng.random() < 0.5,
            empty_steps=rng.random() < 0.5,
        )
        for _ in range(2)
    ]
    try:
        for number in range(40):
            engine = rng.choice(engines)
            engine.add(f"r{number}", rng.sample(images, rng.choice([1, 1, 2, 3])))
            for _ in range(rng.randrange(12)):
                rng.choice(engines).step()
            live = [name for name, one in engine.requests.items() if not one.is_finished()]
            if live and rng.random() < 0.2:
                engine.abort(rng.choice(live))
                met["aborted"] += 1
            if rng.random() < 0.05:
                node.start()
                met["restarted"] += 1
        for engine in engines:
            engine.run(60.0)
            met["fetched"] += engine.ours._loads.stats.fetched
            met["computed"] += len(engine.computed)
        for engine in engines:  # the reports of the last loads
            engine.ask(("last", 1))
            engine.ask(("last but one", 1))
            assert not engine.ours._running
            assert engine.ours._loads.pinned == 0
    finally:
        node.end()
    print(seed, dict(met))
    assert met["fetched"] > 0
