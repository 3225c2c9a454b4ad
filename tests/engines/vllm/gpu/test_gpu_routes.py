"""vLLM's OpenAI server on a GPU with our connector, and our tier behind vLLM's CPU offloading.

The latter is called route B.
"""

import signal
import time
from collections.abc import Callable
from typing import Any

from engine_answers import agree, answers, cached, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import READY_S, agents_ready, stored
from restartable_node import RestartableNode
from vllm_server import Server, store_config

Engines = Callable[..., EngineHandle]
STORED_S = 60.0
FLAGS = {"dtype": "bfloat16", "kv-cache-memory-bytes": 256 << 20, "gpu-memory-utilization": 0.03}


def test_second_server_answers_from_stored_kv(
    models: Callable[..., str], store: RestartableNode
) -> None:
    """The servers also exit in time after SIGINT and SIGTERM."""
    config = store_config(
        store.address, lookup_timeout_s=30.0, load_timeout_s=60.0, slow_hits="take"
    )
    model, one = models("llama", dtype="bfloat16"), prompt(1, 100)
    with Server(model, config, **FLAGS) as first:
        first.wait_up()
        answer = first.complete(one)
        assert answer.cached_tokens == 0
        # Blocks computed before the agents' process was ready wait for it, which takes long beside
        # other engines.
        assert first.wait_metric("vllm:kvstore_pages_saved_total", 3, READY_S) == 3, first.said()[
            -6000:
        ]
        metrics = first.metrics()
        assert metrics["vllm:kvstore_agent_startups_total"] == 1
        assert 0 < metrics["vllm:kvstore_agent_startup_seconds_total"] < READY_S
        assert metrics.get("vllm:kvstore_pages_dropped_total", 0) == 0
        assert first.close() == 0, first.said()[-6000:]
    with Server(model, config, **FLAGS) as second:
        second.wait_up()
        end = time.monotonic() + STORED_S
        # The agents' process needs time to start.
        while second.metrics().get("vllm:kvstore_pages_loaded_total", 0) == 0:
            assert time.monotonic() < end
            second.forget()
            found = second.complete(one)
        assert found.tokens == answer.tokens
        assert found.cached_tokens == 96
        assert second.close(how=signal.SIGTERM) in (0, -signal.SIGTERM), second.said()[-6000:]
        assert "/gpu_agent/" not in second.said(), "a traceback includes our code"


def test_route_b_restores_blocks_offloaded_by_another_engine(
    on_gpu: Engines, store: RestartableNode
) -> None:
    """Blocks go from a GPU and vLLM's CPU tier to the store, then to another engine's."""
    tier = {
        "type": "KVStoreTier",
        "module_path": "gpu_agent.engines.vllm_tier",
        "address": store.address,
    }
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 256 << 20,
        "secondary_tiers": [tier],
    }
    config: dict[str, Any] = {
        **store_config(store.address),
        "kv_connector": "KVStoreOffloadingConnector",
        "kv_connector_module_path": "gpu_agent.engines.vllm_tier",
        "kv_connector_extra_config": extra,
    }
    writer, reader = (
        on_gpu(f"{role} B", kv_transfer_config=config, enforce_eager=True)
        for role in ("writer", "reader")
    )
    one = prompt(2, 300)
    before = len(store.pages())
    expected = found_locally(writer, one)
    end = time.monotonic() + STORED_S
    while len(store.pages()) < before + 9:
        assert time.monotonic() < end, f"{len(store.pages()) - before} pages of 9 are stored"
        # An engine in its own process steps only while it generates.
        writer.generate(prompt(3, 20), max_tokens=1)
        time.sleep(0.2)
    found = reader.alone(one)
    assert cached(found) == [288]
    assert agree(found, expected)
    assert answers(found) == answers(found_locally(reader, one))


def test_multi_connector_with_vllms_offloading(on_gpu: Engines, store: RestartableNode) -> None:
    """Our connector works after the other one, then before it.

    Each of them asks for a layout of its own when it is alone.
    """
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    ours = store_config(store.address, lookup_timeout_s=30.0, load_timeout_s=60.0, slow_hits="take")
    engines = {}
    for role, connectors in {"writer": [offloading, ours], "reader": [ours, offloading]}.items():
        multi: dict[str, Any] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        }
        engines[role] = on_gpu(f"{role} beside", kv_transfer_config=multi, enforce_eager=True)
    one = prompt(4, 300)
    agents_ready(engines["reader"])
    engines["writer"].settle()  # steps, so that its ranks report what they hold
    before = len(store.pages())
    expected = stored(engines["writer"], one)
    end = time.monotonic() + STORED_S
    while len(store.pages()) < before + 9:
        assert time.monotonic() < end, f"{len(store.pages()) - before} pages of 9 are stored"
        engines["writer"].generate(prompt(5, 20), max_tokens=1)
        time.sleep(0.2)
    engines["reader"].settle()
    found = engines["reader"].alone(one)
    assert cached(found) == [288]
    assert agree(found, expected)
    assert answers(found) == answers(found_locally(engines["reader"], one))
    assert "synchronous load of another connector failed" not in engines["reader"].said()
