"""The tier under vLLM's own scheduler.

An engine with an empty CPU tier restores pages saved by another engine. Whatever happens to the
store, requests are served and no restored byte is wrong.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import traces_of_calls
from stopping import stop

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import Engine, model_directory, prompt
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

pytestmark = pytest.mark.filterwarnings("default")
Start = Callable[..., Engine]
# A step of the scheduler takes a millisecond or two, but much longer on a busy machine. A step that
# waits for the store takes at least a deadline, so deadlines here exceed STEP_S_MAX where it
# matters.
DEADLINE_S = 4.0
STEP_S_MAX = 3.0


# For tests that do not test timing.
PATIENT: dict[str, Any] = {
    "lookup_timeout_s": 20.0,
    "load_timeout_s": 20.0,
    "timeout_s": 30.0,
    # An engine that starts beside others may wait for a CPU for seconds.
    "connect_timeout_s": 30.0,
    "backoff_s_max": 0.2,
}


@pytest.fixture
def start(tmp_path: Path, node: NodeProcess) -> Iterator[Start]:
    """Return a function that makes engines of one model on one node, closed at the end."""
    engines = []

    def make(**arguments: Any) -> Engine:
        options = {"address": node.address, **PATIENT, **arguments.pop("options", {})}
        model = arguments.pop("model", None) or model_directory(tmp_path / "tiny")
        engines.append(Engine(model, options, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def before(engine: Engine, method: str, action: Callable[[], object]) -> list[int]:
    """Run `action` before each call of a method of the tier.

    Return a list that gets the number of keys of each call.
    """
    original, calls = getattr(engine.tier, method), []

    def called(job: Any) -> None:
        calls.append(len(job.keys))
        action()
        original(job)

    setattr(engine.tier, method, called)
    return calls


def first_token_s(engine: Engine, requests: int) -> float:
    """Step until `requests` requests were computed, and return the seconds taken."""
    began = time.monotonic()
    while len(engine.computed) < requests:
        engine.step()
        time.sleep(0.002)
    return time.monotonic() - began


# ---- hits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_another_engine_restores_saved_pages(start: Start, wire: str) -> None:
    first, second = (start(options={"wire": wire}) for _ in range(2))
    assert first.serve("cold", prompt(60)) == 0
    assert second.serve("warm", prompt(60)) == 48
    assert second.serve("longer", prompt(60) + prompt(30, 11)) == 48
    assert second.serve("other", prompt(60, 13)) == 0
    assert second.slowest_s < STEP_S_MAX


def test_calls_carry_the_request_id(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traces_of_calls(monkeypatch)
    first, second = start(), start()
    first.serve("cmpl-1", prompt(60))
    assert second.serve("cmpl-2", prompt(60)) == 48
    assert set(asked) == {named("cmpl-1"), named("cmpl-2")}


def test_only_missing_blocks_are_loaded(start: Start) -> None:
    first, second = start(), start()
    first.serve("cold", prompt(124))
    second.serve("head", prompt(40))
    loads = before(second, "submit_load", lambda: None)
    assert second.serve("all", prompt(124)) == 112
    assert loads == [5]  # seven full blocks, of which two are in the second engine's own caches


def test_requests_waiting_for_the_same_pages_load_them_once(start: Start) -> None:
    first, second = start(), start()
    first.serve("cold", prompt(60))
    loads = before(second, "submit_load", lambda: None)
    for name in ("a", "b", "c"):
        second.submit(name, prompt(60))
    second.run()
    assert [second.computed[name] for name in ("a", "b", "c")] == [48, 48, 48]
    assert loads == [3]


def test_sliding_window_layers_are_restored(start: Start) -> None:
    first, second = (start(window=32) for _ in range(2))
    assert first.serve("cold", prompt(124)) == 0
    assert second.serve("warm", prompt(124)) == 112


def test_salted_request_misses_unsalted_pages(start: Start) -> None:
    first, second = start(), start()
    first.serve("plain", prompt(60))
    second.submit("salted", prompt(60), cache_salt="somebody")
    second.run()
    assert second.computed["salted"] == 0


def test_full_cpu_tier_is_a_miss(start: Start) -> None:
    first, second = start(), start(cpu_chunks=2)
    first.serve("cold", prompt(124))
    assert second.serve("warm", prompt(124)) == 0
    assert second.serve("short", prompt(40)) == 32


def test_counts_appear_in_vllms_metrics(start: Start, node: NodeProcess) -> None:
    first, second = start(), start()
    first.serve("cold", prompt(60))
    second.serve("warm", prompt(60))
    node.kill()
    second.serve("away", prompt(60, 3))
    counts = second.stats.reduce()
    ours = {
        name.removeprefix("vllm:kvstore_tier_"): counts[name]
        for name in counts
        if "kvstore" in name
    }
    # The last lookup failed, and the blocks computed instead could not be saved.
    assert ours == {"lookups": 2, "lookups_failed": 1, "pages_loaded": 3, "pages_dropped": 3}
    extra = second.config.kv_transfer_config.kv_connector_extra_config
    assert {name for name in counts if "kvstore" in name} <= set(
        TieringOffloadingSpec.build_metric_definitions(extra)
    )


# ---- the store fails ------------------------------------------------------------------------


def test_killed_node_is_a_miss(start: Start, node: NodeProcess) -> None:
    first, second = start(), start()
    first.serve("cold", prompt(60))
    node.kill()
    assert second.serve("warm", prompt(60)) == 0
    assert second.serve("again", prompt(60)) == 48  # from its own CPU tier or GPU
    assert second.slowest_s < STEP_S_MAX


def test_node_killed_between_lookup_and_load_is_a_miss(start: Start, node: NodeProcess) -> None:
    first, second = start(), start()
    first.serve("cold", prompt(60))
    loads = before(second, "submit_load", node.kill)
    assert second.serve("warm", prompt(60)) == 0
    assert loads == [3]  # loaded once only


def test_node_killed_during_a_save_loses_only_the_pages(start: Start, node: NodeProcess) -> None:
    engine = start()
    saves = before(engine, "submit_store", node.kill)
    assert engine.serve("cold", prompt(60)) == 0
    assert saves == [3]
    assert engine.manager.primary_tier.reset_cache() is None  # no row is held
    assert not engine.tier.has_pending_work()


def test_hung_node_costs_one_deadline(start: Start, node: NodeProcess) -> None:
    first, second = start(), start(options={"lookup_timeout_s": DEADLINE_S, "backoff_s_max": 30.0})
    first.serve("cold", prompt(60))
    stop(node.pid)
    try:
        for name in ("a", "b", "c"):
            second.submit(name, prompt(60) + prompt(20, ord(name)))
        assert DEADLINE_S <= first_token_s(second, 3) < 2 * DEADLINE_S
        second.run()
        began = time.monotonic()
        assert second.serve("next", prompt(60, 3)) == 0
        # Requests do not wait for a store known to hang.
        assert time.monotonic() - began < DEADLINE_S
        assert second.slowest_s < STEP_S_MAX
    finally:
        os.kill(node.pid, signal.SIGCONT)


def test_hung_load_ends_by_its_deadline_and_the_request_is_computed(
    start: Start, node: NodeProcess
) -> None:
    first, second = start(), start(options={"load_timeout_s": DEADLINE_S})
    first.serve("cold", prompt(60))
    before(second, "submit_load", lambda: stop(node.pid))
    try:
        second.submit("warm", prompt(60))
        assert DEADLINE_S <= first_token_s(second, 1) < 2 * DEADLINE_S
        assert second.computed["warm"] == 0
        assert second.slowest_s < STEP_S_MAX
    finally:
        os.kill(node.pid, signal.SIGCONT)
    second.run()


def test_resumed_node_is_used_again(start: Start, node: NodeProcess) -> None:
    first, second = start(), start(options={"lookup_timeout_s": 0.3, "save_timeout_s": 0.3})
    stop(node.pid)
    second.serve("away", prompt(60, 3))
    os.kill(node.pid, signal.SIGCONT)
    end, number = time.monotonic() + 60.0, 10
    first.serve("cold", prompt(60, number))
    # Use another prompt each time, since the engine has computed the previous one.
    while second.serve(f"back {number}", prompt(60, number)) != 48:
        assert time.monotonic() < end
        number += 1
        first.serve(f"cold {number}", prompt(60, number))


def test_chain_with_a_hole_loads_its_head(start: Start, node: NodeProcess) -> None:
    first, second = start(), start()
    request = first.submit("cold", prompt(124))
    first.run()
    hole = request.block_hashes[2] + bytes(4)
    with Client(ClientConfig(address=node.address)) as client:
        space = first.tier.namespace
        loads = before(second, "submit_load", lambda: client.remove(space, [hole]))
        assert second.serve("warm", prompt(124)) == 32
        assert loads == [7]
        # The recomputed blocks were saved, so the hole is closed.
        assert (
            client.lookup(space, [key + bytes(4) for key in request.block_hashes[:7]]).present
            == (True,) * 7
        )


# ---- the engine is reset or stops -----------------------------------------------------------


def test_reset_waits_for_transfers_and_keeps_stored_pages(start: Start, node: NodeProcess) -> None:
    engine = start(options={"save_timeout_s": 0.5})
    engine.serve("cold", prompt(60))
    before(engine, "submit_store", lambda: stop(node.pid))
    engine.submit("saving", prompt(60, 3))
    while not engine.tier.has_pending_work():
        engine.step()
    try:
        began = time.monotonic()
        assert engine.scheduler.connector.reset_cache()
        assert time.monotonic() - began < 10.0
        assert not engine.tier.has_pending_work()
    finally:
        os.kill(node.pid, signal.SIGCONT)
    del engine.tier.submit_store
    engine.run()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    time.sleep(0.5)
    assert engine.serve("warm", prompt(60)) == 48


def test_tier_releases_the_engines_memory(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    engine.serve("cold", prompt(60))
    path = Path(engine.manager.primary_tier._mmap_region.mmap_path)
    assert path.exists()
    view = engine.manager.primary_tier.get_kv_memoryview()
    engine.close()
    assert not path.exists()
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    assert "Keeping" not in caplog.text
