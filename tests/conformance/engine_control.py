"""Start engines and call them (engine_process.py), from a process without vLLM."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOUND = 511  # the token that stands for a sound in a prompt
START_S = 600.0
# A hanging engine must not hold a GPU for long; a machine without one may be busy.
ANSWER_S = {"cpu": 150.0, "cuda": 60.0}
# A machine without a GPU: no core is bound, since engines share them, and nothing is compiled.
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class EngineDied(Exception):
    """The engine's process ended or does not answer; the message has its last error."""


class EngineRefused(Exception):
    """The engine reported an error at its start; the message is the error."""


@dataclass(frozen=True)
class Answer:
    """A request's result. `likely`: the log-probabilities of the likeliest tokens, by position."""

    tokens: tuple[int, ...]
    likely: tuple[dict[str, float], ...] = field(repr=False)
    cached: int
    finish: str


class Spawner:
    """The process that has imported vLLM and forks engines. `python`: an interpreter with vLLM.

    `fresh`: engines are not forked, but import vLLM again. `facts`: versions, and the device.
    """

    def __init__(
        self, python: str, folder: Path, environment: dict[str, str], fresh: bool = False
    ) -> None:
        self.folder = folder
        self._path = str(folder / "engines.socket")
        paths = [str(HERE), environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        joined = os.pathsep.join(path for path in paths if path)
        device = {} if Path("/dev/nvidiactl").exists() else ON_CPU
        variables = {**device, **os.environ, **environment, "PYTHONPATH": joined}
        self._log = (folder / "engines.log").open("w")
        try:
            self._process = subprocess.Popen(
                [python, str(HERE / "engine_process.py"), self._path, *["fresh"] * fresh],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=variables,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise EngineDied(f"{python} can not be run: {error.strerror}") from error
        assert self._process.stdout is not None
        # vLLM may log to stdout before.
        ready = next((line for line in self._process.stdout if line.startswith('{"vllm"')), "")
        if not ready:
            self.close()
            raise EngineDied(f"{python} has no vLLM: {last_error(folder / 'engines.log')}")
        self.facts: dict[str, Any] = json.loads(ready)

    def connect(self) -> socket.socket:
        """Return a connection, which starts an engine. Raises EngineDied."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            log = last_error(self.folder / "engines.log")
            raise EngineDied(f"the process that starts engines is gone: {log}") from error
        return connection

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class Engine:
    """One engine. The constructor returns at once; the first call waits for the start."""

    def __init__(
        self,
        spawner: Spawner,
        name: str,
        arguments: dict[str, Any],
        environment: dict[str, str],
        **more: Any,
    ) -> None:
        self.name = name
        self._answer_s = ANSWER_S.get(spawner.facts["device"], 60.0)
        self.log = spawner.folder / f"{name.replace(' ', '-')}.log"
        self._facts: dict[str, Any] | None = None
        self._failed: EngineDied | EngineRefused | None = None  # at its start
        self._socket = spawner.connect()
        self._lines = self._socket.makefile("rw")
        first = {"arguments": arguments, "environment": environment, "log": str(self.log), **more}
        print(json.dumps(first), file=self._lines, flush=True)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the engine's facts. Raises EngineRefused and EngineDied."""
        if self._failed is not None:
            raise self._failed
        if self._facts is None:
            try:
                found = self._receive(START_S)
                if "error" in found:
                    raise EngineRefused(found["error"])
            except (EngineDied, EngineRefused) as error:
                self._failed = error
                raise
            self._facts = found["facts"]
        return self._facts

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    @property
    def block(self) -> int:
        return int(self.facts["block"])

    @property
    def chunk(self) -> int:
        """Return the tokens of a prefill step; less, if prompts of two chunks would not fit."""
        return min(int(self.facts["chunk"]), int(self.facts["length"]) // 4)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Make a call and return its answer. Raises EngineDied."""
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        assert self.facts
        with contextlib.suppress(BrokenPipeError):  # `receive` reports it
            print(json.dumps({"do": do, **arguments}), file=self._lines, flush=True)

    def receive(self) -> dict[str, Any]:
        found = self._receive(self._answer_s)
        if "error" in found:
            raise EngineDied(found["error"])
        return found

    def generate(self, *prompts: Sequence[int], **arguments: Any) -> list[Answer]:
        """Serve prompts together."""
        return answers(self.ask("generate", prompts=[list(one) for one in prompts], **arguments))

    def settle(self) -> None:
        """Wait until saves have ended. Raises EngineDied if blocks stay in use."""
        found = self.ask("settle")
        if not found["idle"] or found["held"]:
            raise EngineDied(f"idle, but {found['held']} blocks stay in use")

    def fresh(self) -> None:
        """Clear the engine's own cache and poison its blocks."""
        self.settle()
        if not self.ask("reset")["done"]:
            raise EngineDied("idle, but the prefix cache can not be reset")
        self.ask("poison")

    def kill(self) -> None:
        """Kill the engine's process and its children; one that starts ends by itself."""
        if self._facts is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._close()

    def close(self) -> None:
        """End the engine and wait until its process has exited."""
        self._close()
        if self._facts is None:
            return
        end = time.monotonic() + 20.0
        while _alive(self.pid) and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        line = ""
        if ready:
            with contextlib.suppress(ConnectionError):
                line = self._lines.readline()
        if not line:
            state = "ended" if ready else f"does not answer within {timeout_s:.0f} s"
            raise EngineDied(f"{state}: {last_error(self.log)}")
        found: dict[str, Any] = json.loads(line)
        return found


def make_model(spawner: Spawner, kind: str, path: Path, dtype: str) -> None:
    """Make a model or an adapter. Raises EngineRefused, if transformers does not know it."""
    maker = Engine(spawner, f"make {path.name}", {}, {}, model=[kind, str(path), dtype])
    assert maker.facts
    maker.close()


def answers(found: dict[str, Any]) -> list[Answer]:
    return [
        Answer(tuple(one["tokens"]), tuple(one["likely"]), one["cached"], one["finish"])
        for one in found["answers"]
    ]


def last_line(log: Path) -> str:
    return _lines(log)[-1][-300:]


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = _lines(log)
    named = [line for line in lines if "Error" in line or "rror:" in line]
    return (named or lines)[-1][-300:]


def _lines(log: Path) -> list[str]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]


def _alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
