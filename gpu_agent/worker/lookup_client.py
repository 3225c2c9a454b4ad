"""Send a scheduler's lookups to a worker process of their own, from the engine's side.

In threads, a lookup and a touch of each of 64 new prompts took a tenth of the time in which an H200
computed them: Python code keeps the GIL from the engine (vLLM 0.33). Here a lookup costs the engine
50 us, less if many come at once.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpu_agent.blocks.lookups import Answer, Question
from gpu_agent.hint_sender import HintedPages
from gpu_agent.worker import frames
from gpu_agent.worker.frames import Kind
from gpu_agent.worker.worker_process import TIMEOUTS, WorkerProcess, WorkerTimeouts
from kvstore.config import ClientConfig
from kvstore.errors import Exhausted, InvalidRequest, ProtocolError, Unavailable
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.results import Tier
from kvstore.sync import Future
from kvstore.tracing import packed_now
from kvstore.transports.status import from_status

# Registered with one process: a shard of each group, again after each change of the epoch
NAMESPACES_MAX = 1 << 14
_TIERS = bytes((0, *Tier))  # of a key
HINTS_NBYTES_MAX = 8 << 20  # that the process has not read yet, a quarter of what may wait
NAMED = 64  # of the newest ones, registered with a new process at its start; others on demand


class ProcessLookups:
    """`gpu_agent.blocks.lookups.LookupBackend` in a child process.

    Not thread-safe. Raises OSError if the process can not be started.
    """

    name = "lookups"

    def __init__(
        self, client: ClientConfig, command: Sequence[str] = (), timeouts: WorkerTimeouts = TIMEOUTS
    ) -> None:
        self._client = client
        self._namespaces: list[Namespace] = []
        self._numbers: dict[bytes, int] = {}  # by their digests
        self._asked: dict[int, tuple[concurrent.futures.Future[Any], tuple[int, ...], float]] = {}
        self._awaited = 0  # lookups among them; no request waits for a touch
        self._next = 0
        self._child = WorkerProcess(self, command, timeouts)
        self._child.start()

    def await_ready(self, timeout_s: float) -> bool:
        """Wait at the engine's start; before the process is ready, every lookup is a miss."""
        return self._child.await_ready(timeout_s)

    # ---- LookupBackend ---------------------------------------------------------------------

    def look_up(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[Answer]":
        """Send a lookup."""
        return self._ask(Kind.ASK, question, timeout_s)

    def touch(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[None]":
        """Send a touch."""
        return self._ask(Kind.TOUCH, question, timeout_s)

    def hint(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Send what a request says; it is lost if the process is not ready, or has too much to do.

        Lookups always find room behind it: by one without an answer a process that hangs is known.
        """
        if not (self._child.listens and self._child.ready):
            return
        with contextlib.suppress(Exhausted, InvalidRequest):
            groups = self._numbered(hinted.pages)
            tokens = [each for each in hinted.tokens if isinstance(each, range)]
            assert len(tokens) == len(groups), "a scheduler's blocks follow each other"
            asked = frames.AskedHint(
                hinted.hints, tokens, hinted.began, hinted.over, after_s, groups
            )
            self._child.give(frames.hint_frame(asked), HINTS_NBYTES_MAX)
            self._child.poll()  # the engine may idle after this request

    def open(
        self, namespaces: Sequence[Namespace], timeout_s: float
    ) -> "concurrent.futures.Future[None]":
        """Register namespaces; the process opens them when it is ready."""
        done: concurrent.futures.Future[None] = Future()
        try:
            for namespace in namespaces:
                self._number(namespace)
        except Exhausted as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def poll(self) -> None:
        """Take the answers that have arrived."""
        self._child.poll(0.0 if self._awaited else self._child.timeouts.idle_s)

    def pause(self, timeout_s: float) -> None:
        """Wait for an answer, at most that long."""
        self._child.pause(timeout_s)

    def close(self) -> None:
        """End the process."""
        self._child.close(lambda: False)

    def _ask(
        self, kind: Kind, question: Question, timeout_s: float
    ) -> "concurrent.futures.Future[Any]":
        done: concurrent.futures.Future[Any] = Future()
        if not (self._child.listens and self._child.ready):
            self._child.poll()  # the calling thread may be the only one that polls
        if not (self._child.listens and self._child.ready):
            done.set_exception(Unavailable("the lookup process is not ready"))
            return done
        alone = not self._awaited
        self._next += 1
        until = time.monotonic() + timeout_s
        counts = tuple(len(keys) for _, keys in question) if kind is Kind.ASK else ()
        self._asked[self._next] = (done, counts, until + self._child.timeouts.grace_s)
        self._awaited += kind is Kind.ASK
        try:
            groups = self._numbered(question)
            self._child.give(
                frames.question_frame(
                    kind, frames.Question(self._next, until, groups, packed_now())
                )
            )
            # With many at once each would wake the process: those go with the next poll
            if kind is Kind.ASK and alone:
                self._child.poll()
        except (Exhausted, InvalidRequest) as error:  # it was not sent
            self._end(self._next).set_exception(error)
        return done

    def _end(self, number: int) -> "concurrent.futures.Future[Any]":
        done, counts, _ = self._asked.pop(number)
        self._awaited -= bool(counts)
        return done

    def _numbered(self, question: Question) -> list[tuple[list[int], Sequence[bytes]]]:
        return [
            ([self._number(namespace) for namespace in namespaces], keys)
            for namespaces, keys in question
        ]

    def _number(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace.digest)
        if number is None:
            number = len(self._namespaces)
            if number == NAMESPACES_MAX:
                self._child.replace(
                    f"it was named {NAMESPACES_MAX} namespaces, most of them of former epochs"
                )
                raise Exhausted("the lookup process is restarted")
            self._numbers[namespace.digest] = number
            self._namespaces.append(namespace)
            self._child.tell(frames.facts_frame(Kind.ADD, {"namespace": _hex(namespace)}))
        return number

    # ---- Delegate --------------------------------------------------------------------------

    def setup(self) -> tuple[dict[str, Any], Sequence[int]]:
        """Return the process's setup."""
        self._namespaces = self._namespaces[-NAMED:]
        self._numbers = {
            namespace.digest: number for number, namespace in enumerate(self._namespaces)
        }
        known = [_hex(namespace) for namespace in self._namespaces]
        return {"task": self.name, "client": asdict(self._client), "namespaces": known}, ()

    def on_message(self, kind: Kind, body: bytes) -> None:
        """Take an answer. Raises ProtocolError for anything else."""
        if kind is not Kind.ANSWER:
            raise ProtocolError(f"the lookup process sent {kind.name}")
        answer = frames.parse_answer(body)
        if answer.question not in self._asked:
            raise ProtocolError(
                f"an answer to lookup {answer.question}, which does not exist or has its answer"
            )
        _, counts, _ = self._asked[answer.question]
        if not answer.status and tuple(map(len, answer.groups)) != counts:
            raise ProtocolError(
                f"an answer for {tuple(map(len, answer.groups))} keys to a question for {counts}"
            )
        if any(there.strip(_TIERS) for there in answer.groups):
            raise ProtocolError("an answer with an invalid byte for a key")
        done = self._end(answer.question)
        if answer.status:
            done.set_exception(from_status(answer.status, answer.error or ""))
        else:
            done.set_result(tuple(answer.groups) if counts else None)

    def overdue(self, now: float) -> bool:
        """Return whether the oldest lookup should have been answered."""
        oldest = next(iter(self._asked.values()), None)
        return oldest is not None and oldest[2] < now

    def on_exit(self) -> int:
        """Fail all lookups; return how many there were."""
        asked, self._asked, self._awaited = self._asked, {}, 0
        for done, _, _ in asked.values():
            done.set_exception(Unavailable("the lookup process died"))
        return len(asked)


def _hex(namespace: Namespace) -> str:
    return namespace_message(namespace).SerializeToString().hex()
