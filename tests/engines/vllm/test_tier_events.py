"""KV events of an engine with the tier, and requests that name the tiers they load from."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from routed_events import Router
    from scheduler_harness import BLOCK_TOKENS, Engine, model_directory, prompt
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

pytestmark = pytest.mark.filterwarnings("default")
PATIENT = {"lookup_timeout_s": 60.0, "load_timeout_s": 60.0, "timeout_s": 30.0}


@pytest.fixture
def start(tmp_path: Path, node: NodeProcess) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes engines of one model on one node, closed at the end."""
    engines: list[Engine] = []

    def make(**arguments: Any) -> Engine:
        model = model_directory(tmp_path / "tiny")
        engines.append(Engine(model, {"address": node.address, **PATIENT}, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("described", [False, True])
def test_events_name_the_engines_own_tiers_only(
    start: Callable[..., Engine], described: bool
) -> None:
    """What the store has is said by nobody, neither after a save nor after a load from it."""
    extra = {"self_describing_kv_events": described}
    first, second = (start(events=True, extra=extra) for _ in range(2))
    routers = [Router(engine.scheduler, BLOCK_TOKENS) for engine in (first, second)]
    assert first.serve("cold", prompt(60)) == 0
    assert second.serve("warm", prompt(60)) == 48
    for engine, router in zip((first, second), routers, strict=True):
        router.check()
        assert router.score(prompt(60)) == 3.0
        assert {event.medium for event in router.events} == {"GPU", "CPU"}
        assert {getattr(event, "ownership", None) for event in router.events} == {None}
        assert list(engine.tier.take_events()) == []


def test_request_for_the_cpu_tier_loads_nothing_from_the_store(
    start: Callable[..., Engine],
) -> None:
    """Regression: the tier had no medium, which matches every filter of a request."""
    start().serve("cold", prompt(60))
    second = start()
    for medium, expected in (("CPU", 0), ("STORAGE", 48)):
        second.submit(medium, prompt(60), transfer={"kv_load_tiers": [{"medium": medium}]})
        second.run()
        assert second.computed[medium] == expected
        second.scheduler.reset_prefix_cache(reset_connector=True)
    assert second.tier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
