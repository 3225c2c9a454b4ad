"""The tests' side of engine_process.py, and the node beside it."""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_server import environment

from kvstore import Client, ClientConfig
from kvstore.measure.node_process import NodeProcess

HERE = Path(__file__).parent
ANSWER_S = 600.0  # of an engine that may start beside others; one that hangs ends with its last words
Page = tuple[bytes, bytes]  # namespace digest, prefix hash


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens that no other seed begins with."""
    numbers = random.Random(seed)
    return [numbers.randrange(5, 505) for _ in range(tokens)]


def answers(requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[float], str]]:
    """What must not depend on the store: tokens, their float32 log-probabilities to the last bit, how they ended."""
    return [(request["tokens"], request["logprobs"], request["finish"]) for request in requests]


def cached(requests: Sequence[dict[str, Any]]) -> list[int]:
    """Prompt tokens that each request found in a cache."""
    return [request["cached"] for request in requests]


class EngineHandle:
    """One engine in a process of its own. Fails with what the engine printed."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `close`
        ranks = arguments.get("tensor_parallel_size", 1)
        # Not bound: several engines share the machine's cores.
        bound = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks)) if ranks > 1 else "nobind"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
            cwd=HERE,
            # One thread: tiny models gain nothing from more, and the engines of a file share the cores.
            env=environment(VLLM_CPU_OMP_THREADS_BIND=bound, OMP_NUM_THREADS="1"),
        )
        self._ready = False

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self._wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        return self._answer()

    def generate(self, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
        """One `{"tokens", "logprobs", "cached", "finish", "ttft_s"}` per prompt, asked together."""
        found = self.ask("generate", prompts=[list(prompt) for prompt in prompts], **order)
        requests: list[dict[str, Any]] = found["requests"]
        return requests

    def alone(self, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
        """The same one after the other, each with an empty cache of the engine's own."""
        found = []
        for prompt in prompts:
            self.reset()
            found += self.generate(prompt, **order)
        return found

    def reset(self, connector: bool = False) -> None:
        self.settle()
        assert self.ask("reset", connector=connector)["done"], "blocks are still held"

    def settle(self) -> dict[str, Any]:
        """Until the saves of finished requests have ended."""
        found = self.ask("settle")
        assert found["idle"], f"{self._name} still has something to do: {found}"
        assert found["blocks_held"] == 0, f"{self._name} leaks blocks: {found}"
        return found

    def chain(self, whole: Sequence[int]) -> list[bytes]:
        """Names of the pages of a prompt's full blocks."""
        return [bytes.fromhex(name) for name in self.ask("chain", prompt=list(whole))["hashes"]]

    def arm(self, at: str, do: str, **fault: Any) -> None:
        """See engine_faults.py."""
        time.sleep(0.1)  # what the last request left to do in other threads is no occasion
        self.ask("arm", faults=[{"at": at, "do": do, **fault}])

    def struck(self) -> list[str]:
        """Faults that happened since the last question, in all processes of the engine."""
        return [fault for process in self.ask("report")["processes"] for fault in process["struck"]]

    def calls(self) -> dict[str, int]:
        """Calls of the store since the last question, by moment, in all processes of the engine."""
        total: dict[str, int] = {}
        for process in self.ask("report")["processes"]:
            for at, count in process["calls"].items():
                total[at] = total.get(at, 0) + count
        return total

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Until it is up."""
        self._wait_ready()

    def said(self) -> str:
        """What the engine has printed so far."""
        self._said.flush()
        with open(f"/proc/self/fd/{self._said.fileno()}") as file:
            return file.read()

    def end(self) -> None:
        """Tells it to end; `close` waits for that."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before
                self._process.stdin.close()

    def close(self) -> None:
        self.end()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def _wait_ready(self) -> None:
        if not self._ready:
            self._answer()
            self._ready = True

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], ANSWER_S)
        line = out.readline() if ready else ""
        if not line:
            state = "does not answer" if ready == [] else f"ended with {self._process.wait(10.0)}"
            raise AssertionError(f"engine {self._name} {state}; it said:\n{self.said()[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class RestartableNode:
    """A node with a disk tier on one address: killed and started again it has its pages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._node: NodeProcess | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._node is not None
        return self._node.pid

    def start(self) -> None:
        """Ends the old one, if there is any, and starts one on the same directory and address."""
        self.end()
        flags = ("--port", str(self.port), "--data-dir", str(self._directory), "--log-level", "WARNING")
        sizes = ("--ram-bytes", "256MiB", "--extent-bytes", "16MiB", "--disk-bytes", "1GiB")
        python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
        self._node = NodeProcess(*flags, *sizes, python=python)

    def stop(self) -> None:
        """As a machine does that hangs."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._node is not None:
            self._node.kill()
            self._node = None

    def flush(self) -> None:
        with self.client() as client:
            client.flush()

    def client(self) -> Client:
        return Client(ClientConfig(address=self.address))

    def pages(self) -> dict[Page, bytes]:
        """Bytes of every page that is stored."""
        found = {}
        with self.client() as client:
            for namespace, _ in client.namespaces():
                hashes = [page.prefix_hash for page in client.list_pages(namespace)]
                buffers = [bytearray(namespace.layout.page_nbytes) for _ in hashes]
                hits = client.get(namespace, hashes, buffers) if hashes else []
                assert all(hits)
                found |= {(namespace.digest, name): bytes(page) for name, page in zip(hashes, buffers, strict=True)}
        return found

    def __enter__(self) -> "RestartableNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
