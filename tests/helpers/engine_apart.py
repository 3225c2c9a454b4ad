"""The tests' side of an engine in its own process.

Requests and answers are JSON objects, one per line. The first answer says that the engine is up.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Long enough for engines that start at the same time; a hanging one fails with its output
ANSWER_S = 600.0


class EngineApart:
    """A process that runs `script` with its `arguments` in JSON.

    Failures include the output of the engine.
    """

    def __init__(
        self, name: str, script: Path, arguments: dict[str, Any], environment: dict[str, str]
    ) -> None:
        self._name = name
        paths = [str(HERE), environment.get("PYTHONPATH", "")]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
            cwd=script.parent,
            env={**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        self._ready = False

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self._wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        return self._answer()

    def generate(self, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
        """Serve prompts together and return one result each.

        Keys of a result: tokens, logprobs, cached, finish, transfer, ttft_s.
        """
        found = self.ask("generate", prompts=[list(prompt) for prompt in prompts], **order)
        requests: list[dict[str, Any]] = found["requests"]
        return requests

    def alone(self, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
        """Serve prompts one after the other, each with the engine's own cache empty."""
        found = []
        for prompt in prompts:
            self.reset()
            found += self.generate(prompt, **order)
        return found

    def reset(self) -> None:
        """Clear the engine's own cache."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Wait until the engine is up."""
        self._wait_ready()

    def said(self) -> str:
        """Return the engine's output so far."""
        self._said.flush()
        with open(f"/proc/self/fd/{self._said.fileno()}") as file:
            return file.read()

    def end(self) -> None:
        """Ask the engine to exit; `close` waits for it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has already exited
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
            state = "does not answer" if ready == [] else f"ended with {self._process.wait(60.0)}"
            raise AssertionError(f"engine {self._name} {state}; its output:\n{self.said()[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def close_all(running: dict[str, EngineApart]) -> None:
    """Close engines in parallel, because each takes seconds."""
    for handle in running.values():
        handle.end()
    for handle in running.values():
        handle.close()
