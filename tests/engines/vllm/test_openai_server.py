"""vLLM's OpenAI-compatible server with the store: the second server answers from the first one's KV."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine_handle import EngineHandle, RestartableNode, environment, prompt, store_config

UP_S = 150.0
P = prompt(1, 100)


class Server:
    def __init__(self, model: str, store: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._base = f"http://127.0.0.1:{free.getsockname()[1]}"
        flags = {
            "model": model,
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": self._base.rpartition(":")[2],
            "dtype": "float32",
            "max-model-len": "512",
            "block-size": "32",
            "kv-transfer-config": json.dumps(store),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `serving`
        env = environment(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_SERVER_DEV_MODE="1")
        self.process = subprocess.Popen(command, stdout=self._said, stderr=subprocess.STDOUT, env=env)

    def said(self) -> str:
        self._said.flush()
        with open(f"/proc/self/fd/{self._said.fileno()}") as file:
            return file.read()

    def wait_up(self) -> None:
        end = time.monotonic() + UP_S
        while True:
            try:
                with urllib.request.urlopen(f"{self._base}/health", timeout=5.0) as reply:
                    assert reply.status == 200
                    return
            except (urllib.error.URLError, ConnectionError):
                waiting = self.process.poll() is None and time.monotonic() < end
                assert waiting, self.said()[-6000:]
                time.sleep(0.2)

    def complete(self, tokens: list[int]) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def metrics(self) -> dict[str, float]:
        """Values by name, added up over labels."""
        with urllib.request.urlopen(f"{self._base}/metrics", timeout=10.0) as reply:
            lines = reply.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


@contextmanager
def serving(model: str, store: dict[str, Any]) -> Iterator[Server]:
    """Ends it as Ctrl-C does: it must end by itself, with status 0, and leave nothing running."""
    server = Server(model, store)
    try:
        server.wait_up()
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60.0) == 0, server.said()[-6000:]
        assert "Traceback" not in server.said(), server.said()[-6000:]
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server._said.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_the_second_server_answers_from_the_first_ones_kv(
    plain: Callable[..., EngineHandle], models: Callable[..., str], store: RestartableNode
) -> None:
    expected = plain().alone(P)[0]["tokens"]
    config = store_config(store.address)
    with serving(models("llama"), config) as first:
        answer = first.complete(P)
        assert answer["choices"][0]["token_ids"] == expected
        assert wait_for(lambda: first.metrics().get("vllm:kvstore_pages_saved_total", 0) == 3)
    store.wait_pages(3)
    with serving(models("llama"), config) as second:
        answer = second.complete(P)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        found = second.metrics()
        assert found["vllm:external_prefix_cache_queries_total"] == 100
        assert found["vllm:external_prefix_cache_hits_total"] == 96
        assert found["vllm:prompt_tokens_by_source_total"] == 100
        # The connector's own.
        assert wait_for(lambda: second.metrics().get("vllm:kvstore_pages_loaded_total", 0) == 3)
        found = second.metrics()
        assert found["vllm:kvstore_hit_tokens_total"] == 96
        assert found["vllm:kvstore_loaded_nbytes_total"] == 3 * 65536
        assert found["vllm:kvstore_loads_failed_total"] == 0
        assert os.path.exists(f"/proc/{second.process.pid}")
