"""Our connector beside others in vLLM's own `MultiConnector`: first, last, between them and as the
only one there.
"""

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
def _nothing_heard() -> None:
    for kept in (WithHandshake.heard, FailsToLoad.tables, LoadsForever.aborted):
        kept.clear()


def example(path: Path) -> dict[str, Any]:
    """vLLM's own example, which knows one group of layers."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    }


def hears_its_ranks(engine: Any) -> None:
    """As an idle engine does after its start."""
    assert engine.scheduler.has_requests() or engine.connector._scheduler
    engine.run()
    assert engine.connector._scheduler is not None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_blocks_stored_by_one_engine_are_found_by_another(
    make: Engines, where: str, ranks: int
) -> None:
    arguments: dict[str, Any] = {"beside": WHERE[where], "ranks": ranks}
    make.save(P, **arguments)
    engine = make(**arguments)
    hears_its_ranks(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    if where != "alone":
        assert WithHandshake.heard == [{(0, rank): Payload("nobody") for rank in range(ranks)}] * 2


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_connector_of_vllm_itself_beside_ours(make: Engines, where: str, tmp_path: Path) -> None:
    """It has no handshake, and with it requests end by another call, for it knows one group of
    layers.
    """
    other = example(tmp_path / "example")
    beside = ([], [other]) if where == "first" else ([other], [])
    make.save(P, beside=beside)
    engine = make(beside=beside)
    hears_its_ranks(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}
    assert engine.connector._scheduler._requests == {}


def test_an_engine_beside_another_finds_what_one_with_ours_alone_stored(make: Engines) -> None:
    make.save(P)
    engine = make(beside=WHERE["last"])
    hears_its_ranks(engine)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_came_before_the_ranks_were_heard_are_stored(
    make: Engines, ranks: int
) -> None:
    """The first one of an engine that did not idle."""
    engine = make(beside=WHERE["last"], ranks=ranks, batch_tokens=32)
    assert engine.connector._scheduler is None
    engine.add("early", P)
    engine.add("gone", tokens(3, 40))
    engine.abort("gone")
    engine.run()
    assert engine.outputs["early"] == answer(P, 8)
    again = make(beside=WHERE["last"], ranks=ranks)
    hears_its_ranks(again)
    assert again.generate(P) == answer(P, 8)
    assert again.cached == {"r": 48}


def test_ranks_tell_what_they_hold_until_it_is_known_and_no_longer(make: Engines) -> None:
    engine = make(beside=WHERE["last"], ranks=2)
    hears_its_ranks(engine)
    engine.generate(P)
    for rank in engine.ranks:
        assert rank.connector.build_connector_worker_meta().held == {}


def test_an_engine_whose_ranks_say_nothing_serves_without_a_store_and_comes_to_rest(
    make: Engines,
) -> None:
    engine = make(beside=WHERE["last"])
    engine.ranks[0].connector._rank_id, engine.ranks[0].connector._rank = (), None
    engine.run()  # ends: an idle engine does not wait for ever
    assert engine.connector._scheduler is None
    assert engine.generate(P) == answer(P, 8)


def test_an_engine_without_any_page_serves_without_a_store(
    make: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    connector = adapter.KVStoreConnector(
        engine.config, KVConnectorRole.SCHEDULER, engine.ranks[0].caches
    )
    connector.bind_gpu_block_pool(engine.pool)
    connector.set_xfer_handshake_metadata({0: adapter.Handshake([None])})
    assert connector._scheduler is None
    assert not connector.has_pending_push_work()


@pytest.mark.parametrize("metadata", [{}, {0: None}, {0: Payload("somebody")}])
def test_metadata_that_is_foreign_or_missing_raises_nothing(
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
def test_the_layout_of_another_connector_is_taken(
    make: Engines, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.current_platform, "is_cuda_alike", lambda: True)
    config = make(beside=WHERE[where]).config
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"
    alone = make().config
    assert adapter.KVStoreConnector.get_required_kvcache_layout(alone) == "BLHNC"


def test_statistics_of_ours_travel_through_the_outer_one(make: Engines) -> None:
    """A server's front end rebuilds them by the connector's name."""
    engine = make(beside=WHERE["last"])
    hears_its_ranks(engine)
    engine.generate(P)
    data = {name: stats.data for name, stats in engine.stats.data.items()}
    assert data["KVStoreConnector"]["lookups"] == 1
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert rebuilt.data["KVStoreConnector"].data["lookups"] == 1


def test_blocks_after_a_failed_load_of_another_connector_are_not_stored(
    make: Engines,
) -> None:
    """vLLM computes the blocks again, and may keep the wrong ones in its prefix cache: nothing of
    this engine is stored any more. Until then all is.
    """
    engine = make(beside=([played("FailsToLoad")], []))
    hears_its_ranks(engine)
    assert engine.generate(P, name="failed") == answer(P, 8)
    longer = P + tokens(13, 60)
    assert engine.generate(longer, name="next") == answer(longer, 8)
    reader = make()
    assert reader.generate(longer) == answer(longer, 8)
    assert reader.cached == {"r": 0}
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.connector._scheduler._stopped is False


def test_a_request_aborted_while_another_connector_loads_it_stores_nothing(make: Engines) -> None:
    """vLLM counts as computed what the other one has promised."""
    engine = make(beside=([played("LoadsForever")], []))
    hears_its_ranks(engine)
    engine.add("r", P)
    engine.run(until=lambda: engine.requests["r"].num_computed_tokens == LoadsForever.TOKENS)
    engine.abort("r")
    LoadsForever.aborted.add("r")
    engine.run()
    reader = make()
    assert reader.generate(P) == answer(P, 8)
    assert reader.cached == {"r": 0}


def test_the_process_of_the_lookups_is_started_before_the_first_step(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start may wait seconds for it; a step that waited would stop all requests for as long."""
    made: list[str] = []
    real, phase = adapter.lookup_backend_for, "start"
    monkeypatch.setattr(
        adapter, "lookup_backend_for", lambda *arguments: (made.append(phase), real(*arguments))[1]
    )
    engine = make(beside=WHERE["last"])
    phase = "step"
    hears_its_ranks(engine)
    assert engine.generate(P) == answer(P, 8)
    assert made == ["start"]


@pytest.mark.parametrize("where", [None, WHERE["last"]], ids=["alone", "beside"])
def test_min_tokens_that_is_no_number_is_refused_at_the_start(make: Engines, where: Any) -> None:
    """And not in the first step of an engine that serves."""
    with pytest.raises(ConfigError, match="option min_tokens='many' is not a whole number"):
        make(store={"min_tokens": "many"}, beside=where)


def test_calls_through_a_wrapper_or_a_generator_of_the_outer_one_are_recognised(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracer may wrap our methods, and the outer connector may ask its connectors in a
    generator.
    """
    ours = adapter.KVStoreConnector.get_handshake_metadata

    def traced(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    def asked(self: Any) -> Any:
        return next(
            (told for told in (one.get_handshake_metadata() for one in self._connectors) if told),
            None,
        )

    monkeypatch.setattr(adapter.KVStoreConnector, "get_handshake_metadata", traced)
    monkeypatch.setattr(MultiConnector, "get_handshake_metadata", asked)
    engine = make(beside=WHERE["first"])
    assert WithHandshake.heard == [{(0, 0): Payload("nobody")}]
    assert isinstance(make().ranks[0].connector.get_handshake_metadata(), adapter.Handshake)
    hears_its_ranks(engine)


def test_a_call_that_no_python_code_made_counts_as_vllms(make: Engines) -> None:
    """As compiled code makes it: there is no caller to look at."""
    connector = make().ranks[0].connector
    told: SimpleQueue[Any] = SimpleQueue()
    asked = map(operator.call, [connector.get_handshake_metadata])
    _thread.start_new_thread(deque, (map(told.put, asked), 0))
    assert isinstance(told.get(timeout=10), adapter.Handshake)


def test_both_roles_are_built_by_vllms_own_factory(make: Engines) -> None:
    """And the harness of this file tests the class that users get."""
    engine = make(beside=WHERE["last"])
    assert isinstance(engine.outer, MultiConnector)
    assert [type(one).__name__ for one in engine.outer.sub_connectors] == [
        "WithHandshake",
        "KVStoreConnector",
    ]
    assert scheduler_beside.ours_of(engine.ranks[0].outer) is engine.ranks[0].connector
