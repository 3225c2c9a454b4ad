"""Our connector with others in vLLM's own `MultiConnector`: first, last, between them and alone."""

import _thread
import operator
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import scheduler_beside
from scheduler_beside import FailsToLoad, LoadsForever, Payload, WithHandshake, played
from scheduler_engine import Engines, adapter, answer, tokens
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvstore.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")

P = tokens(7, 60)  # 3 blocks and 12 tokens
HANDSHAKE = played("WithHandshake")
WHERE: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "first": ([], [HANDSHAKE]),
    "last": ([HANDSHAKE], []),
    "between": ([played("Silent")], [HANDSHAKE]),
    "alone": ([], []),
}


@pytest.fixture(autouse=True)
def _clear_records() -> None:
    for kept in (WithHandshake.heard, FailsToLoad.tables, LoadsForever.aborted):
        kept.clear()


def example(path: Path) -> dict[str, Any]:
    """Return vLLM's own example connector, which supports one group of layers."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    }


def wait_for_handshake(engine: Any) -> None:
    """Run the engine until its ranks' handshakes have arrived, as when it idles after its start."""
    assert engine.scheduler.has_requests() or engine.connector._scheduler
    engine.run()
    assert engine.connector._scheduler is not None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_blocks_saved_by_one_engine_hit_in_another(make: Engines, where: str, ranks: int) -> None:
    arguments: dict[str, Any] = {"beside": WHERE[where], "ranks": ranks}
    make.save(P, **arguments)
    engine = make(**arguments)
    wait_for_handshake(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    if where != "alone":
        assert WithHandshake.heard == [{(0, rank): Payload("nobody") for rank in range(ranks)}] * 2


@pytest.mark.parametrize("where", ["first", "last"])
def test_vllms_example_connector_beside_ours(make: Engines, where: str, tmp_path: Path) -> None:
    """The example connector has no handshake and supports one group of layers.

    For such a connector vLLM ends requests by another call.
    """
    other = example(tmp_path / "example")
    beside = ([], [other]) if where == "first" else ([other], [])
    make.save(P, beside=beside)
    engine = make(beside=beside)
    wait_for_handshake(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}
    assert engine.connector._scheduler._requests == {}


def test_multi_connector_finds_pages_saved_without_it(make: Engines) -> None:
    make.save(P)
    engine = make(beside=WHERE["last"])
    wait_for_handshake(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_before_the_handshake_are_saved(make: Engines, ranks: int) -> None:
    """The first request arrives before the engine has idled."""
    engine = make(beside=WHERE["last"], ranks=ranks, batch_tokens=32)
    assert engine.connector._scheduler is None
    engine.add("early", P)
    engine.add("gone", tokens(3, 40))
    engine.abort("gone")
    engine.run()
    assert engine.outputs["early"] == answer(P, 8)
    again = make(beside=WHERE["last"], ranks=ranks)
    wait_for_handshake(again)
    assert again.generate(P) == answer(P, 8)
    assert again.cached == {"r": 48}


def test_ranks_stop_reporting_after_the_handshake(make: Engines) -> None:
    engine = make(beside=WHERE["last"], ranks=2)
    wait_for_handshake(engine)
    engine.generate(P)
    for rank in engine.ranks:
        assert rank.connector.build_connector_worker_meta().namespaces == {}


def test_engine_without_handshakes_serves_and_becomes_idle(
    make: Engines,
) -> None:
    engine = make(beside=WHERE["last"])
    engine.ranks[0].connector._rank_id, engine.ranks[0].connector._rank = (), None
    engine.run()  # returns: an idle engine does not wait forever
    assert engine.connector._scheduler is None
    assert engine.generate(P) == answer(P, 8)


def test_engine_without_pages_serves_without_a_store(
    make: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    connector = adapter.KVStoreConnector(
        engine.config, KVConnectorRole.SCHEDULER, engine.ranks[0].caches
    )
    connector.bind_gpu_block_pool(engine.pool)
    connector.set_xfer_handshake_metadata({0: adapter.Handshake([[]])})
    assert connector._scheduler is None
    assert not connector.has_pending_push_work()


@pytest.mark.parametrize("metadata", [{}, {0: None}, {0: Payload("somebody")}])
def test_foreign_or_missing_metadata_does_not_raise(
    make: Engines, metadata: dict[int, Any]
) -> None:
    engine = make()
    connector = adapter.KVStoreConnector(
        engine.config, KVConnectorRole.SCHEDULER, engine.ranks[0].caches
    )
    connector.bind_gpu_block_pool(engine.pool)
    connector.set_xfer_handshake_metadata(metadata)
    assert connector._scheduler is None
    assert connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)


@pytest.mark.parametrize("where", ["first", "last", "between"])
def test_layout_of_another_connector_is_accepted(
    make: Engines, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.current_platform, "is_cuda_alike", lambda: True)
    config = make(beside=WHERE[where]).config
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"
    alone = make().config
    assert adapter.KVStoreConnector.get_required_kvcache_layout(alone) == "BLHNC"


def test_statistics_pass_through_the_multi_connector(make: Engines) -> None:
    """A server's front end rebuilds the statistics by the connector's name."""
    engine = make(beside=WHERE["last"])
    wait_for_handshake(engine)
    engine.generate(P)
    data = {name: stats.data for name, stats in engine.stats.data.items()}
    assert data["KVStoreConnector"]["lookups"] == 1
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert rebuilt.data["KVStoreConnector"].data["lookups"] == 1


def test_other_connectors_failed_load_stops_saves(
    make: Engines,
) -> None:
    """After a failed load of another connector the engine saves nothing more, until a reset.

    vLLM recomputes the blocks, but may keep wrong ones in its prefix cache.
    """
    engine = make(beside=([played("FailsToLoad")], []))
    wait_for_handshake(engine)
    assert engine.generate(P, name="failed") == answer(P, 8)
    longer = P + tokens(13, 60)
    assert engine.generate(longer, name="next") == answer(longer, 8)
    reader = make()
    assert reader.generate(longer) == answer(longer, 8)
    assert reader.cached == {"r": 0}
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.connector._scheduler._stopped is False


def test_request_aborted_during_another_connectors_load_saves_nothing(make: Engines) -> None:
    """vLLM counts the tokens promised by the other connector as computed."""
    engine = make(beside=([played("LoadsForever")], []))
    wait_for_handshake(engine)
    engine.add("r", P)
    engine.run(until=lambda: engine.requests["r"].num_computed_tokens == LoadsForever.TOKENS)
    engine.abort("r")
    LoadsForever.aborted.add("r")
    engine.run()
    reader = make()
    assert reader.generate(P) == answer(P, 8)
    assert reader.cached == {"r": 0}


def test_lookup_process_starts_before_the_first_step(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start may wait seconds for the process; a step that waits would stop all requests."""
    made: list[str] = []
    real, phase = adapter.lookup_backend_for, "start"
    monkeypatch.setattr(
        adapter, "lookup_backend_for", lambda *arguments: (made.append(phase), real(*arguments))[1]
    )
    engine = make(beside=WHERE["last"])
    phase = "step"
    wait_for_handshake(engine)
    assert engine.generate(P) == answer(P, 8)
    assert made == ["start"]


@pytest.mark.parametrize("where", [None, WHERE["last"]], ids=["alone", "beside"])
def test_non_numeric_min_tokens_is_refused_at_the_start(make: Engines, where: Any) -> None:
    """The option is not first checked in a step of a serving engine."""
    for value in ("many", float("inf")):
        with pytest.raises(ConfigError, match=f"option min_tokens={value!r} is not a whole number"):
            make(store={"min_tokens": value}, beside=where)


def test_calls_through_a_wrapper_or_generator_are_recognised(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracer may wrap our methods, and a MultiConnector may call connectors in a generator."""
    ours = adapter.KVStoreConnector.get_handshake_metadata

    def traced(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    def asked(self: Any) -> Any:
        return next(
            (data for data in (one.get_handshake_metadata() for one in self._connectors) if data),
            None,
        )

    monkeypatch.setattr(adapter.KVStoreConnector, "get_handshake_metadata", traced)
    monkeypatch.setattr(MultiConnector, "get_handshake_metadata", asked)
    engine = make(beside=WHERE["first"])
    assert WithHandshake.heard == [{(0, 0): Payload("nobody")}]
    assert isinstance(make().ranks[0].connector.get_handshake_metadata(), adapter.Handshake)
    wait_for_handshake(engine)


def test_call_without_a_python_caller_counts_as_vllms(make: Engines) -> None:
    """Compiled code may call the method, so that there is no calling frame to inspect."""
    connector = make().ranks[0].connector
    results: SimpleQueue[Any] = SimpleQueue()
    asked = map(operator.call, [connector.get_handshake_metadata])
    _thread.start_new_thread(deque, (map(results.put, asked), 0))
    assert isinstance(results.get(timeout=60.0), adapter.Handshake)


def test_both_roles_are_built_by_vllms_factory(make: Engines) -> None:
    """The harness of this file thus tests the production class."""
    engine = make(beside=WHERE["last"])
    assert isinstance(engine.outer, MultiConnector)
    assert [type(one).__name__ for one in engine.outer.sub_connectors] == [
        "WithHandshake",
        "KVStoreConnector",
    ]
    assert scheduler_beside.ours_of(engine.ranks[0].outer) is engine.ranks[0].connector
