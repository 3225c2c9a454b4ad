"""vLLM's own scheduler: prefill's ticket lets decode wait for pages that are being saved."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import scheduler_beside
from scheduler_beside import played
from scheduler_engine import BLOCK, Engine, Engines, answer, start_node, tokens

from kvstore.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")

P = tokens(7, 60)  # 3 blocks and 12 tokens
ASK = {"do_remote_decode": True}  # what proxies of other connectors send
PATIENT = {"handover_wait_s": 60.0}
HASTY = {"handover_wait_s": 0.2}
BESIDE: dict[str, Any] = {
    "alone": None,
    "first": ([], [played("WithHandshake")]),
    "last": ([played("WithHandshake")], []),
    "only": ([], []),
}


@pytest.fixture(autouse=True)
def _clear_records() -> Iterator[None]:
    yield
    scheduler_beside.WithHandshake.heard.clear()


def prefill(engine: Engine, prompt: list[int] = P, **params: Any) -> dict[str, Any] | None:
    """Compute a prompt, as a proxy asks for it, and return what the proxy passes on."""
    engine.add("p", prompt, 1, kv_transfer_params=params or dict(ASK))
    while "p" not in engine.answered:
        engine.step()
    found = engine.answered["p"]
    return None if found is None else json.loads(json.dumps(found))


def held(engine: Engine) -> None:
    """Let the ranks hold their saves back."""
    for rank in engine.ranks:
        rank.held = []
        rank.connector._rank.save = rank.held.extend


def release(engine: Engine) -> None:
    for rank in engine.ranks:
        del rank.connector._rank.save
        rank.connector._rank.save(rank.held)


def waiting(engine: Engine) -> list[str]:
    return list(engine.connector._scheduler._handovers._waiting)


def ready(engine: Engine) -> Engine:
    """Return the engine once its ranks are known, which a `MultiConnector` delays."""
    engine.run()
    assert engine.connector._scheduler is not None
    return engine


def counts(engine: Engine) -> dict[str, float]:
    data = engine.stats.data
    data = getattr(data.get("KVStoreConnector"), "data", data)
    return {name: data.get(name, 0) for name in ("handovers", "handovers_short")}


@pytest.mark.parametrize(
    "arguments",
    [
        *({"beside": beside} for beside in BESIDE.values()),
        {"ranks": 2},
        {"window": 40},
        {"states": 32},
        {"overlap": True},
    ],
    ids=[*BESIDE, "ranks", "window", "states", "overlap"],
)
def test_decode_waits_for_a_delayed_save(make: Engines, arguments: dict[str, Any]) -> None:
    """Another request is served meanwhile."""
    first, second = ready(make(**arguments)), ready(make(PATIENT, **arguments))
    held(first)
    ticket = prefill(first)
    assert set(ticket) == {"kvstore.ticket"}
    second.add("d", P, kv_transfer_params=ticket)
    second.add("other", tokens(11, 40))
    second.run(until=second.requests["other"].is_finished)
    for _ in range(50):
        second.step()
    assert second.outputs == {"d": [], "other": answer(tokens(11, 40), 8)}
    assert waiting(second) == ["d"]
    release(first)
    first.run()
    second.run(60.0)
    assert second.outputs["d"] == answer(P, 8)
    assert second.cached["d"] == (32 if "states" in arguments else 48)
    assert counts(second) == {"handovers": 1, "handovers_short": 0}
    assert waiting(second) == []
    assert second.connector._lookups._pending == {}
    assert second.pool.get_num_free_blocks() == second.free_blocks


@pytest.mark.parametrize("beside", BESIDE)
def test_producer_hands_over_signed_pages_to_a_consumer(
    make: Engines, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    other = make(PATIENT)
    monkeypatch.setenv("KVSTORE_PAGE_KEY", "5a" * 32)
    first, second = (
        ready(make(PATIENT, role=role, outer=role, beside=BESIDE[beside], window=40))
        for role in ("kv_producer", "kv_consumer")
    )
    held(first)
    ticket = prefill(first)
    assert other.generate(P, kv_transfer_params=ticket) == answer(P, 8)
    assert counts(other)["handovers"] == 0, "it could not verify them"
    second.add("d", P, kv_transfer_params=ticket)
    for _ in range(20):
        second.step()
    assert waiting(second) == ["d"]
    release(first)
    first.run()
    second.run(60.0)
    assert (second.outputs["d"], second.cached["d"]) == (answer(P, 8), 48)


def test_ticket_of_stored_pages_costs_no_wait(make: Engines) -> None:
    first, second = make(), make(PATIENT)
    ticket = prefill(first)
    first.run()
    assert second.generate(P, kv_transfer_params=ticket) == answer(P, 8)
    assert second.cached == {"r": 48}
    assert counts(second) == {"handovers": 1, "handovers_short": 0}


def test_save_of_a_handover_waits_for_no_other_blocks(make: Engines) -> None:
    """Without a hand-over, few blocks wait for more."""
    orders: list[int] = []
    for params in (None, dict(ASK)):
        engine = make()
        engine.connector._scheduler._plan._hold_s = 1e9
        seen: list[Any] = []
        engine.on_execute = lambda step, seen=seen: seen.extend(step.saves)
        engine.add("p", P, 1, kv_transfer_params=params)
        engine.run(60.0, until=lambda engine=engine: "p" in engine.answered)
        for _ in range(20):
            engine.step()
        orders.append(sum(len(part.keys) for save in seen for part in save.parts))
    assert orders == [0, 3]


def test_decode_computes_when_the_save_never_comes(make: Engines) -> None:
    first, second = make(), make(HASTY)
    held(first)
    ticket = prefill(first)
    assert second.generate(P, kv_transfer_params=ticket) == answer(P, 8)
    assert second.cached == {"r": 0}
    assert counts(second) == {"handovers": 1, "handovers_short": 1}
    assert second.stats.data["handover_wait_seconds"] >= 0.2
    release(first)


def test_decode_loads_what_is_there_when_the_wait_ends(make: Engines) -> None:
    first, second = make(), make(HASTY)
    ticket = prefill(first)
    first.run()
    first.forget([first.requests["p"].block_hashes[2]])
    assert second.generate(P, kv_transfer_params=ticket) == answer(P, 8)
    assert second.cached == {"r": 32}
    assert counts(second) == {"handovers": 1, "handovers_short": 1}


def test_hole_before_the_last_block_is_waited_for(make: Engines) -> None:
    """The last block is asked for first, and all of them once it is there."""
    first, second = make(), make(PATIENT)
    ticket = prefill(first)
    first.run()
    first.forget([first.requests["p"].block_hashes[0]])
    second.add("d", P, kv_transfer_params=ticket)
    for _ in range(100):
        second.step()
    assert waiting(second) == ["d"]
    first.scheduler.reset_prefix_cache()
    first.generate(P, 1, name="again")
    second.run(60.0)
    assert (second.outputs["d"], second.cached["d"]) == (answer(P, 8), 48)


@pytest.mark.parametrize("when", ["before", "during"])
def test_node_that_ends_ends_the_wait(make: Engines, when: str) -> None:
    with start_node() as node:
        first = make({"address": node.address})
        second = make({"address": node.address, **PATIENT})
        held(first)
        ticket = prefill(first)
        if when == "before":
            node.kill()
        second.add("d", P, kv_transfer_params=ticket)
        if when == "during":
            for _ in range(20):
                second.step()
            assert waiting(second) == ["d"]
            node.kill()
        second.run(60.0)
        assert second.outputs["d"] == answer(P, 8)
        assert second.cached["d"] == 0
        release(first)


GOOD = {"v": 1, "tokens": 48, "store": "0" * 32, "prompt": "0" * 32}


@pytest.mark.parametrize(
    "fields",
    [
        "text",
        7,
        [GOOD],
        {},
        {**GOOD, "v": 2},
        {**GOOD, "tokens": -1},
        {**GOOD, "tokens": 48.0},
        {**GOOD, "tokens": True},
        {**GOOD, "tokens": 1 << 70},
        {**GOOD, "store": "x" * 1_000_000},
        {**GOOD, "prompt": ["0"] * 32},
        {str(n): n for n in range(10_000)},
        GOOD,
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_foreign_or_broken_ticket_costs_a_log_line(
    make: Engines, fields: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(PATIENT)
    engine.generate(P, kv_transfer_params={"kvstore.ticket": fields})
    assert engine.outputs["r"] == answer(P, 8)
    assert counts(engine)["handovers"] == 0


@pytest.mark.parametrize("what", ["prompt", "shorter", "store", "epoch"])
def test_ticket_for_something_else_is_not_waited_for(make: Engines, what: str) -> None:
    first = make({"tenant": "other"} if what == "store" else None)
    second = make(PATIENT)
    if what == "epoch":
        second.connector.reset_cache()
    held(first)
    ticket = prefill(first, tokens(11, 60) if what == "prompt" else P)
    prompt = P[:40] if what == "shorter" else P
    assert second.generate(prompt, kv_transfer_params=ticket) == answer(prompt, 8)
    assert counts(second) == {"handovers": 0, "handovers_short": 0}
    release(first)


@pytest.mark.parametrize(
    "params",
    [
        {"kvstore.handover": False, **ASK},
        {"do_remote_prefill": True},
        {"kvstore.skip": True, **ASK},
    ],
    ids=str,
)
def test_no_ticket_unless_asked_for(make: Engines, params: dict[str, Any]) -> None:
    assert prefill(make(), **params) is None


def test_own_name_asks_for_a_ticket(make: Engines) -> None:
    assert prefill(make(), **{"kvstore.handover": True})["kvstore.ticket"]["tokens"] == 48


def test_no_ticket_where_nothing_is_saved(make: Engines) -> None:
    engine = make()
    engine.connector._scheduler.stop_saving()
    assert prefill(engine) is None
    assert prefill(make(), P[: BLOCK - 1]) is None
    assert prefill(make(role="kv_consumer")) is None


@pytest.mark.parametrize(("length", "cached"), [(200, 192), (192, 191)])
@pytest.mark.parametrize("arguments", [{}, {"overlap": True}], ids=str)
def test_window_that_vllm_frees_before_it_is_saved_is_handed_over(
    make: Engines, length: int, cached: int, arguments: dict[str, Any]
) -> None:
    """Twelve blocks of each group, where 16 of both together may be pinned."""
    arguments, prompt = {"window": 40, **arguments}, tokens(9, length)
    first, second = make(**arguments), make(PATIENT, **arguments)
    ticket = prefill(first, prompt)
    assert ticket is not None
    first.run()
    assert second.generate(prompt, kv_transfer_params=ticket) == answer(prompt, 8)
    assert second.cached == {"r": cached}


def test_aborted_prefill_gives_no_ticket(make: Engines) -> None:
    engine = make(batch_tokens=32)
    engine.add("p", P, kv_transfer_params=dict(ASK))
    engine.step()
    engine.abort("p")
    engine.run()
    assert engine.answered.get("p") is None


def test_request_aborted_while_it_waits_leaves_nothing(make: Engines) -> None:
    first, second = make(), make(PATIENT)
    held(first)
    ticket = prefill(first)
    second.add("d", P, kv_transfer_params=ticket)
    for _ in range(20):
        second.step()
    second.abort("d")
    second.run()
    assert waiting(second) == []
    assert second.connector._lookups._pending == {}
    release(first)


def test_reset_ends_the_wait(make: Engines) -> None:
    """Pages of the old epoch are of no use to the new one."""
    first, second = make(), make(PATIENT)
    held(first)
    second.add("d", P, kv_transfer_params=prefill(first))
    for _ in range(20):
        second.step()
    second.connector.reset_cache()
    second.run(60.0)
    assert (second.outputs["d"], second.cached["d"]) == (answer(P, 8), 0)
    release(first)


def test_decode_saves_what_it_generated(make: Engines) -> None:
    first, second = make(), make(PATIENT)
    ticket = prefill(first)
    first.run()
    second.generate(P, 40, kv_transfer_params=ticket)
    turn = P + answer(P, 40) + tokens(3, 10)
    third = make()
    assert third.generate(turn) == answer(turn, 8)
    assert third.cached == {"r": 96}  # of 99 tokens with KV


def test_other_connectors_handover_is_not_waited_for(make: Engines) -> None:
    """NIXL brings the prompt, and our ticket travels with its parameters."""
    beside = BESIDE["last"]
    first, second = ready(make(beside=beside)), ready(make(PATIENT, beside=beside))
    held(first)
    ticket = {**(prefill(first) or {}), "do_remote_prefill": True}
    assert second.generate(P, kv_transfer_params=ticket) == answer(P, 8)
    assert counts(second)["handovers"] == 0
    release(first)


def test_two_stores_in_one_multi_connector_give_one_ticket(make: Engines) -> None:
    """`MultiConnector` raises if two connectors answer under one name."""
    engine = make()
    other = scheduler_beside.transfer_config(
        {"address": make.address, "tenant": "second"}, "recompute", None
    )
    beside = {
        name: getattr(other, name)
        for name in ("kv_connector", "kv_connector_module_path", "kv_role")
    }
    beside["kv_connector_extra_config"] = other.kv_connector_extra_config
    engine = ready(make(beside=([], [beside])))
    assert prefill(engine) is not None


@pytest.mark.parametrize(
    ("roles", "loads", "saves"),
    [
        ({"role": "kv_producer"}, False, True),
        ({"role": "kv_consumer"}, True, False),
        ({"outer": "kv_producer", "beside": ([], [])}, False, True),
        ({"outer": "kv_consumer", "beside": ([], [])}, True, True),
    ],
    ids=str,
)
def test_roles(make: Engines, roles: dict[str, Any], loads: bool, saves: bool) -> None:
    """Beside overlapping steps, vLLM lets only consumers load into freed blocks."""
    make.save(P)
    engine = ready(make(**roles))
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48 if loads else 0}
    longer = tokens(13, 60)
    assert engine.generate(longer, name="new") == answer(longer, 8)
    reader = make()
    assert reader.generate(longer) == answer(longer, 8)
    assert reader.cached == {"r": 48 if saves else 0}


@pytest.mark.parametrize("value", ["long", -1, 61, float("nan"), None])
def test_invalid_wait_is_refused_at_the_start(make: Engines, value: Any) -> None:
    with pytest.raises(ConfigError, match="option handover_wait_s="):
        make({"handover_wait_s": value})


def test_no_wait_without_a_time(make: Engines) -> None:
    first, second = make(), make({"handover_wait_s": 0})
    held(first)
    assert second.generate(P, kv_transfer_params=prefill(first)) == answer(P, 8)
    assert counts(second)["handovers"] == 0
    release(first)
