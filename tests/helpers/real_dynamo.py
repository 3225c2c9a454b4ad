"""Dynamo's own routers, frontend and workers, in processes of the environment that has it."""

import contextlib
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from waiting import wait_until

from kvstore.keys import prefix_hashes

PYTHON = os.environ.get("KVSTORE_DYNAMO_PYTHON", "")
HERE = Path(__file__).parent
BLOCK = 4  # tokens
WORKER = "backend"  # the component of a single worker, and its model's name
LOCAL = "127.0.0.1"
HOSTS = ("TCP_RPC_HOST", "TCP_RESPONSE_STREAM_HOST", "EVENT_PLANE_HOST", "SYSTEM_HOST")
# What a worker of SGLang publishes of one rank without a prefix
STORE = {
    "backend": "mooncake",
    "page_size": BLOCK,
    "tp_size": 1,
    "pp_size": 1,
    "is_mla_model": False,
    "is_eagle": False,
    "should_split_heads": False,
}
Bridge = Callable[..., "subprocess.Popen[bytes]"]  # starts one, with flags
TOKENS = [*range(10, 10 + 6 * BLOCK)]
KEYS = prefix_hashes(TOKENS, BLOCK)
INSTALLED = pytest.mark.skipif(not PYTHON, reason="make test-dynamo installs Dynamo")
VOCABULARY = 1000  # tokens w0, w1, ...; the last one ends a text


class Process:
    """A program that says lines of JSON; its log goes to a file."""

    def __init__(self, log: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
        known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as said:
            self.process = subprocess.Popen(
                command,
                env={**known, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self._log = log

    def said(self, name: str) -> Any:
        """Return the value of the next line that has this name."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict) and name in value:
                    return value[name]
        raise AssertionError(f"it has ended: {self._log.read_text()[-2000:]}")

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.said("answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Router(Process):
    """Dynamo's router by itself."""

    def shared(self, tokens: Sequence[int], component: str = WORKER) -> set[int]:
        """Return the numbers of the blocks that the shared store has."""
        found = self.ask(component=component, scores=tokens)["shared_cache"]
        assert found["enabled"]
        assert not found["error"]
        blocks = {number for start, end in found["ranges"] for number in range(start, end)}
        assert len(blocks) == found["total_hit_blocks"]
        return blocks

    def own(self, tokens: Sequence[int]) -> dict[str, int]:
        """Return how many blocks the only worker has, by tier."""
        (worker,) = self.ask(component=WORKER, scores=tokens)["workers"]
        return {tier: worker[f"{tier}_blocks"] for tier in ("device", "host_pinned", "disk")}


def wait_for(router: Router, blocks: set[int], component: str = WORKER) -> None:
    """Wait until the store has these blocks of TOKENS, for the router."""
    wait_until(lambda: router.shared(TOKENS, component) == blocks)


class Frontend(Process):
    """Dynamo's frontend: HTTP, tokenizer and router."""

    port = 0

    def http(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"http://{LOCAL}:{self.port}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return str(reply.read().decode())

    def serves(self) -> bool:
        try:
            return WORKER in self.http("/v1/models")
        except OSError:
            return False

    def hits(self, prompt: str | Sequence[int]) -> float:
        """Let a worker continue a prompt; return how many of its blocks the store has."""
        before = self._blocks_found()
        self.http("/v1/completions", {"model": WORKER, "prompt": prompt, "max_tokens": 1})
        return self._blocks_found() - before

    def _blocks_found(self) -> float:
        name = r"^\w*router_shared_cache_beyond_blocks_sum{.*} (\S+)$"
        return sum(map(float, re.findall(name, self.http("/metrics"), re.MULTILINE)))


class Deployment:
    """Workers, routers and frontends that find each other in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = write_model(folder / "model")
        self._processes: list[Process] = []
        self._variables = {f"DYN_{name}": LOCAL for name in HOSTS} | {
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_SELF_HOST_METADATA": "0",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder),  # its caches
        }

    def _start(self, kind: Any, command: Sequence[str], **variables: str) -> Any:
        log = self._folder / f"log{len(self._processes)}"
        made = kind(log, [PYTHON, *command], {**self._variables, **variables})
        self._processes.append(made)
        return made

    def workers(self, stores: Mapping[str, Any], **more: Any) -> Process:
        """Start workers in one process, each with its component; return when all are known."""
        given = {"folder": str(self.model), "block_tokens": BLOCK, "stores": stores, **more}
        process: Process = self._start(Process, [str(HERE / "dynamo_worker.py"), json.dumps(given)])
        process.said("ready")
        return process

    def router(self, **rules: Any) -> Router:
        """Start a router; it does nothing before the first question."""
        known = {"shared_cache_type": "hicache", "use_kv_events": False}
        given = {"block_tokens": BLOCK, "rules": {**known, **rules}}
        made: Router = self._start(Router, [str(HERE / "dynamo_router.py"), json.dumps(given)])
        return made

    def frontend(self, events: str) -> Frontend:
        """Start a frontend that follows the store's events; return when it serves the model."""
        port = free_port()
        flags = ["--http-host", LOCAL, "--http-port", str(port), "--discovery-backend", "file"]
        flags += ["--event-plane", "zmq", "--router-mode", "kv", "--shared-cache-type", "hicache"]
        made: Frontend = self._start(
            Frontend, ["-m", "dynamo.frontend", *flags], DYN_MOONCAKE_KV_EVENTS_ENDPOINT=events
        )
        made.port = port
        wait_until(made.serves)
        return made

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def write_model(folder: Path) -> Path:
    """Write what Dynamo reads of a model: a configuration, and a tokenizer of whole words."""
    folder.mkdir(parents=True)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    end = {"eos_token_id": VOCABULARY - 1}
    files = {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "vocab_size": VOCABULARY,
            **end,
        },
        "generation_config": end,
        "tokenizer_config": {"eos_token": f"w{VOCABULARY - 1}", "chat_template": "none"},
        "tokenizer": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        },
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
