"""Who asks the store for an engine's scheduler: threads of its process, or another process (`gpu_agent.process`).

Lookups --- Asker --- store          questions go out at once, futures are done in their own time
"""

import concurrent.futures
import logging
import operator
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.sync import Future
from kvstore.threads import ThreadPool
from kvstore.tracing import NamesRequest, carried

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())
Result = TypeVar("Result")

# For each group of layers: the namespaces of all shards, and the keys of the blocks.
Question: TypeAlias = Sequence[tuple[Sequence[Namespace], Sequence[bytes]]]
# For each group of layers a byte per key: 1 for a block that every shard has.
Answer: TypeAlias = tuple[bytes, ...]

THREADS = 4
_PAUSE_S = 0.0002


class Asker(Protocol):
    """Calls never wait, but for `pause` and `close`. Exceptions of futures are KVStoreErrors."""

    def look_up(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[Answer]": ...

    def touch(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[None]":
        """Counts pages as used, heads last."""

    def open(self, namespaces: Sequence[Namespace], timeout_s: float) -> "concurrent.futures.Future[None]":
        """Connects and registers."""

    def poll(self) -> None:
        """Futures of lookups that were answered are done afterwards, those of touches then or some steps later."""

    def pause(self, timeout_s: float) -> None:
        """Waits until a question may have been answered, and no longer than that."""

    def close(self) -> None:
        """Answers are not awaited any more."""


class ThreadAsker:
    """Threads of this process. `client` is closed with them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lookups = ThreadPool(THREADS, "kvstore-lookup")
        self._touches = ThreadPool(1, "kvstore-touch")  # for which no request waits

    def look_up(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[Answer]":
        deadline = Deadline(timeout_s)
        return _submitted(self._lookups, lambda: found_everywhere(self._client, question, deadline))

    def touch(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[None]":
        deadline = Deadline(timeout_s)
        return _submitted(self._touches, lambda: touched(self._client, question, deadline))

    def open(self, namespaces: Sequence[Namespace], timeout_s: float) -> "concurrent.futures.Future[None]":
        deadline = Deadline(timeout_s)
        return _submitted(self._lookups, lambda: opened(self._client, namespaces, deadline))

    def poll(self) -> None:
        """The threads do it."""

    def pause(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, _PAUSE_S))

    def close(self) -> None:
        for executor in (self._touches, self._lookups):
            executor.shutdown(wait=True, cancel_futures=True)
        self._client.close()


def found_everywhere(client: Client, question: Question, deadline: Deadline) -> Answer:
    """Which pages all shards have. Raises Exhausted if its turn came too late, which says nothing about the node."""
    if deadline.passed:
        raise Exhausted(f"too many lookups at a time: one had no thread in {deadline.seconds:g} s")
    answer = []
    for namespaces, keys in question:
        there = bytes((True,)) * len(keys)
        for namespace in namespaces if keys else ():
            found = client.lookup(namespace, keys, timeout_s=deadline.remaining()).present
            there = bytes(map(operator.and_, there, found))
        answer.append(there)
    return tuple(answer)


def touched(client: Client, question: Question, deadline: Deadline) -> None:
    """Not if its turn came too late: nobody waits for it."""
    if deadline.passed:
        return
    for namespaces, keys in question:
        for namespace in namespaces if keys else ():
            client.lookup(namespace, keys, touch=True, timeout_s=deadline.remaining())


def opened(client: Client, namespaces: Sequence[Namespace], deadline: Deadline) -> None:
    for namespace in namespaces:
        client.open(namespace, deadline.remaining())


def _submitted(
    executor: concurrent.futures.Executor, call: Callable[[], Result]
) -> "concurrent.futures.Future[Result]":
    def run() -> Result:
        try:
            return call()
        except KVStoreError:
            raise
        except Exception as error:  # the edge of a thread: whatever broke, the request gets its answer
            log.exception("a lookup broke")
            raise KVStoreError(repr(error)) from error

    try:
        return executor.submit(carried(run))
    except RuntimeError as error:  # no thread can be had, or the interpreter ends
        failed: concurrent.futures.Future[Result] = Future()
        failed.set_exception(Unavailable(str(error)))
        return failed
