"""vLLM's OpenAI-compatible server with the store, and its metrics."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine_answers import prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode
from vllm_server import Server, store_config

P = prompt(1, 100)


def test_second_server_answers_from_stored_kv(
    plain: Callable[..., EngineHandle], models: Callable[..., str], store: RestartableNode
) -> None:
    expected = plain().alone(P)[0]["tokens"]
    config = store_config(store.address, lookup_timeout_s=30.0, load_timeout_s=60.0)
    with Server(models("llama"), config) as first:
        first.wait_up()
        answer = first.complete(P)
        assert (answer.tokens, answer.cached_tokens) == (expected, 0)
        assert first.wait_metric("vllm:kvstore_pages_saved_total", 3) == 3
        assert first.close() == 0, first.said()[-6000:]  # by SIGINT
    with Server(models("llama"), config) as second:
        second.wait_up()
        answer = second.complete(P)
        assert (answer.tokens, answer.cached_tokens) == (expected, 96)
        assert second.wait_metric("vllm:kvstore_pages_loaded_total", 3) == 3
        found = second.metrics()
        assert found["vllm:external_prefix_cache_queries_total"] == 100
        assert found["vllm:external_prefix_cache_hits_total"] == 96
        # The connector's own metrics.
        assert found["vllm:kvstore_hits_total"] == 1
        assert found["vllm:kvstore_hit_tokens_total"] == 96
        assert found["vllm:kvstore_loaded_nbytes_total"] == 3 * 65536
        assert found["vllm:kvstore_load_seconds_total"] > 0
        assert found["vllm:kvstore_loads_failed_total"] == 0
        # The node ends while the server is idle; the server keeps serving and exits normally.
        store.end()
        assert second.complete([*P, 5]).tokens
        assert second.close() == 0, second.said()[-6000:]
        assert "/gpu_agent/" not in second.said(), "a traceback includes our code"


def test_vllm_demo_exits_with_success() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "demo_vllm.py"
    command = [
        sys.executable,
        str(script),
        "--layers",
        "2",
        "--hidden",
        "192",
        "--tokens",
        "200",
        "--json",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert '"equal": true' in done.stdout
    assert '"cached_tokens": 192' in done.stdout
