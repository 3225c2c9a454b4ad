"""Run vLLM's OpenAI-compatible server in a process, with or without the store.

It serves the demo, the benchmark and the tests. It needs an environment with vLLM
(tests/engines/vllm/install.sh).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from ports import free_port

ROOT = Path(__file__).resolve().parents[1]
UP_S = 600.0  # imports alone take 10 s on two idle cores, and minutes on a busy machine
ANSWER_S = 600.0


class ServerFailed(Exception):
    """The server did not start or ended by itself; the message has its last lines."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs vLLM on the CPU with this project."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Not bound to cores and nothing compiled: the first request would wait for a compiler.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        **more,
    }


def store_config(address: str, **options: Any) -> dict[str, Any]:
    """Return a user's --kv-transfer-config."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "gpu_agent.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **options},
    }


def save_llama(directory: Path, layers: int, hidden: int, vocabulary: int = 512) -> None:
    """Save a Llama with random weights from a fixed seed, float32, heads of 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        head_dim=64,
        max_position_embeddings=16384,
        initializer_range=0.06,  # large enough that other prompts get other tokens
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@dataclass(frozen=True)
class Answer:
    """`ttft_s`: from the request to its first token.

    `cached_tokens`: prompt tokens that were not computed.
    """

    tokens: list[int]
    ttft_s: float
    cached_tokens: int


class Server:
    """A server on a free port of the loopback interface.

    `flags` are vLLM's own, without the dashes. `python`: an interpreter with vLLM and our wheel;
    empty: this one, with our sources. `variables` are added to its environment.
    """

    def __init__(
        self,
        model: Path | str,
        store: dict[str, Any] | None = None,
        python: str = "",
        variables: Mapping[str, str] | None = None,
        **flags: Any,
    ) -> None:
        port = free_port()
        self._base = f"http://127.0.0.1:{port}"
        values: dict[str, Any] = {
            "dtype": "float32",
            "max-model-len": 512,
            "block-size": 32,
            "port": port,
            **flags,
        }
        if store is not None:
            values["kv-transfer-config"] = json.dumps(store)
        command = [
            python or sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
        ]
        command += ["--model", str(model), "--served-model-name", "model"]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
        command += [
            word
            for name, value in values.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `close`
        # VLLM_SERVER_DEV_MODE enables /reset_prefix_cache
        env = environment(VLLM_SERVER_DEV_MODE="1", **(variables or {}))
        if python:  # and nothing of the working directory
            env = {**env, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command, stdout=self._said, stderr=subprocess.STDOUT, env=env
        )

    def wait_up(self) -> None:
        """Wait until the server is up. Raises ServerFailed."""
        end = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self._base}/health", timeout=5.0).close()
                return
            if self._process.poll() is not None or time.monotonic() > end:
                raise ServerFailed(
                    f"vLLM's server did not come up; it said:\n{self.said()[-4000:]}"
                )
            time.sleep(0.2)

    def said(self) -> str:
        """Return the output so far."""
        self._said.flush()
        return Path(f"/proc/self/fd/{self._said.fileno()}").read_text()

    def prefill(self, prompt: Sequence[int], transfer: dict[str, Any]) -> dict[str, Any] | None:
        """Compute a prompt and one token, and return the answer's `kv_transfer_params`."""
        body = {**_request(prompt, 1, transfer), "stream": False}
        with self._post("/v1/completions", body) as reply:
            found: dict[str, Any] | None = json.load(reply).get("kv_transfer_params")
        return found

    def complete(
        self, prompt: Sequence[int], max_tokens: int = 8, transfer: dict[str, Any] | None = None
    ) -> Answer:
        """Complete a prompt greedily, streamed, without a tokenizer."""
        body = {
            **_request(prompt, max_tokens, transfer),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, ttft_s = time.perf_counter(), 0.0
        tokens: list[int] = []
        cached_tokens = 0
        with self._post("/v1/completions", body) as reply:
            for line in reply:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                piece = json.loads(text)
                for choice in piece.get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                if tokens and not ttft_s:
                    ttft_s = time.perf_counter() - start
                details = (piece.get("usage") or {}).get("prompt_tokens_details") or {}
                cached_tokens = max(cached_tokens, details.get("cached_tokens") or 0)
        return Answer(tokens, ttft_s, cached_tokens)

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the store keeps its pages."""
        self._post("/reset_prefix_cache", {}).close()

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, summed over labels."""
        with urllib.request.urlopen(f"{self._base}/metrics", timeout=ANSWER_S) as reply:
            lines = reply.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_metric(self, name: str, value: float, timeout_s: float = 30.0) -> float:
        """Wait until a counter has reached `value`, and return it."""
        end = time.monotonic() + timeout_s
        while True:
            found = self.metrics().get(name, 0.0)
            if found >= value or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def close(self, timeout_s: float = 60.0, how: signal.Signals = signal.SIGINT) -> int:
        """End the server by a signal and return its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(how)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._said.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=ANSWER_S)


def _request(
    prompt: Sequence[int], max_tokens: int, transfer: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
        **({"kv_transfer_params": transfer} if transfer else {}),
    }


# What NIXL's proxies ask a prefill engine for
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def hand_over(
    prefill: Server, decode: Server, prompt: Sequence[int], max_tokens: int = 8
) -> Answer:
    """Do what a proxy does: prefill on one server, decode on another, with the first's ticket.

    `ttft_s` counts from the start of prefill; its own token is not the first one.
    """
    start = time.perf_counter()
    transfer = prefill.prefill(prompt, REMOTE_DECODE)
    before_s = time.perf_counter() - start
    found = decode.complete(prompt, max_tokens, transfer)
    return replace(found, ttft_s=before_s + found.ttft_s)
