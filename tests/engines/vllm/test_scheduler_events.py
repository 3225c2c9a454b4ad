"""KV events of an engine with the connector, decoded by vLLM's structs and replayed as routers do.

The connector adds none to those of the engine's own cache (docs/decisions/0055-router-events.md).
"""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from routed_events import Router
    from scheduler_engine import BLOCK, Engine, Engines, answer, tokens
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

pytestmark = pytest.mark.filterwarnings("default")
P = tokens(7, 60)


def router_of(engine: Engine) -> Router:
    return Router(engine.scheduler, BLOCK)


@pytest.mark.parametrize("kind", [{}, {"window": 40}, {"ranks": 2}])
def test_published_events_are_those_of_the_engines_cache(
    make: Engines, caplog: pytest.LogCaptureFixture, kind: Mapping[str, int]
) -> None:
    """Whatever is stored, loaded or evicted, routers know what is on the GPU and nothing else."""
    with caplog.at_level("INFO", "vllm.kvstore"):
        engine = make(blocks=24, events=True, **kind)
    assert caplog.text.count("the store sends none") == 1
    router = router_of(engine)
    computed = engine.generate(P, name="computed")
    assert "window" in kind or computed == answer(P, 8)
    engine.step()
    router.check()
    assert router.score(P) == 3.0
    for seed in (11, 13, 17, 19):  # more than the engine's cache holds; the store has all
        engine.generate(tokens(seed, 100), name=f"other {seed}")
        engine.step()
        router.check()
    assert router.score(P) == 0.0, "evicted, and only in the store: any engine may load it"
    assert engine.generate(P, name="loaded") == computed
    assert engine.cached["loaded"] == 48
    engine.step()
    router.check()
    assert router.score(P) == 3.0
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    router.check()
    assert router.score(P) == 0.0
    kinds = {type(event).__name__ for event in router.events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert {event.medium for event in router.events if hasattr(event, "medium")} == {"GPU"}
    assert list(engine.connector.take_events()) == []


def stored(locality: str | None, **changes: Any) -> list[Any]:
    """Return events that says that the store has P's full blocks."""
    event = BlockStored(
        block_hashes=[b"0" * 32, b"1" * 32, b"2" * 32],
        parent_block_hash=None,
        token_ids=P[: 3 * BLOCK],
        block_size=BLOCK,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
        **changes,
        **({"locality": locality} if locality else {}),
    )
    return [event]


def test_why_the_connector_says_nothing_of_the_store(make: Engines) -> None:
    """Replay what it could say, as vLLM's own storage tiers do.

    llm-d takes a page in the store for one on the publisher's GPU; Dynamo drops what is remote, and
    believes what is local until a removal comes, which an engine can not send.
    """
    engine = make(events=True)
    remote, local = router_of(engine), router_of(engine)
    remote.take(stored("REMOTE"))
    assert remote.score(P) == 3.0, "the weight of the GPU"
    assert (dict(remote.dynamo.tiers), remote.dynamo.dropped) == ({}, 1)
    local.take(stored("LOCAL"))
    assert len(local.dynamo.tiers["disk"]) == 3
    gone = BlockRemoved(block_hashes=[b"0" * 32], medium="GPU")
    local.take([gone])
    assert (len(local.dynamo.tiers["disk"]), local.score(P)) == (3, 3.0)
    # Without extra keys, blocks of an image or a salted prompt are credited to the plain prompt
    salted = router_of(engine)
    salted.take(stored("REMOTE", extra_keys=[("salt",), None, None]))
    assert salted.score(P) == 0.0
