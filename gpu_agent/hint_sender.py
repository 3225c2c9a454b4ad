"""Send hints to the store in the background; an engine never waits for them, nor fails by them.

request's words --- HintSender --- which pages, and how old its session is
                        |
                    HintQueue  --- a thread that calls the store
"""

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias

from gpu_agent.hints import RequestHints
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.results.hints import Hint, HintAction
from kvstore.sync import Condition
from kvstore.threads import ThreadPool

log = logging.getLogger(__name__)
log.addFilter(LogRate())
WAITING_MAX = 1024  # hints about the pages of one namespace; further ones are dropped
SESSIONS_MAX = 4096

# For each group of layers: the namespaces of all shards, and the keys of the pages, head first.
Pages: TypeAlias = Sequence[tuple[Sequence[Namespace], Sequence[bytes]]]
AT_ONCE = (0.0,)


class Send(Protocol):
    """Take a hint about pages, and seconds after which it is sent. Never waits.

    It is sent again, after the next of these seconds, only if pages were refused, such as those
    that were not stored yet.
    """

    def __call__(self, hint: Hint, pages: Pages, after_s: Sequence[float]) -> None:
        """Take a hint."""


class _Due(NamedTuple):
    """A hint that waits. Times are monotonic."""

    at: float
    number: int  # hints that are due together are sent in the order in which they came
    hint: Hint
    namespace: Namespace
    keys: Sequence[bytes]
    again: Sequence[float]
    since: float  # time of the session's age


class HintQueue:
    """Send hints one after the other. Thread-safe.

    Its thread starts with the first hint. `timeout_s`: of a call.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._thread = ThreadPool(1, "kvstore-hints")
        self._changed = Condition()
        self._due: list[_Due] = []  # a heap
        self._numbers = itertools.count()
        self._running = False
        self._closed = False
        self.dropped = 0

    def send(self, hint: Hint, pages: Pages, after_s: Sequence[float]) -> None:
        """Take a hint, as `Send` says."""
        now = time.monotonic()
        first, *again = [now + seconds for seconds in after_s]
        for namespaces, keys in pages:
            for namespace in namespaces if keys or hint.action is HintAction.DELETE else ():
                self._put(_Due(first, next(self._numbers), hint, namespace, keys, again, now))

    def _put(self, due: _Due) -> None:
        with self._changed:
            if self._closed or len(self._due) >= WAITING_MAX:
                self.dropped += 1
                return
            if not self._running:
                try:
                    self._thread.submit(self._run)
                except RuntimeError:  # no thread is left
                    self.dropped += 1
                    return
                self._running = True
            heapq.heappush(self._due, due)
            self._changed.notify_all()

    def _run(self) -> None:
        while due := self._next():
            if not self._took(due) and due.again:
                at, *again = due.again
                self._put(due._replace(at=at, again=again))

    def _next(self) -> _Due | None:
        """Wait for the next hint that is due; None if there is none."""
        with self._changed:
            while self._due and not self._closed:
                left_s = self._due[0].at - time.monotonic()
                if left_s <= 0:
                    return heapq.heappop(self._due)
                self._changed.wait(left_s)
            self._running = False
            return None

    def _took(self, due: _Due) -> bool:
        """Send a hint, and return whether the store refused none of the pages."""
        age_s = due.hint.session_age_s + time.monotonic() - due.since
        hint = replace(due.hint, session_age_s=age_s)
        try:
            result = self._client.hint(due.namespace, due.keys, hint, self._timeout_s)
        except KVStoreError as error:  # such as an older node
            log.info("a hint was not sent: %s", error)
            return False
        if result.clipped or result.refused:
            log.debug("hint %s: %s", due.hint.action.name, result)
        return not result.refused

    @property
    def waiting_count(self) -> int:
        """Return how many hints wait."""
        return len(self._due)

    def close(self) -> None:
        """Send nothing more; a running call ends by its deadline."""
        with self._changed:
            self._closed = True
            self.dropped += len(self._due)
            self._due.clear()
            self._changed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)


class HintSender:
    """Turn what requests say into hints about their pages. Used by one thread.

    `send`: where the hints go. `after_s`: as in `Send`, for all hints but those of a session's last
    request: they are sent with the last try of others, so that its pages are stored by then.
    """

    def __init__(self, send: Send, after_s: Sequence[float] = AT_ONCE) -> None:
        self._send = send
        self._after_s = after_s
        self._begun: OrderedDict[str, float] = OrderedDict()  # sessions, by their last request

    def begin(self, said: RequestHints) -> None:
        """Note when a session's first request came: pages stored before are not its own."""
        if said.session:
            self._begun.setdefault(said.session, time.monotonic())
            self._begun.move_to_end(said.session)
            if len(self._begun) > SESSIONS_MAX:
                self._begun.popitem(last=False)

    def send(self, said: RequestHints, pages: Pages, tokens: Sequence[Sequence[int]]) -> None:
        """Send what a request says about its pages.

        `tokens`: for each group a token of each page.
        """
        now = time.monotonic()
        age_s = now - self._begun.get(said.session, now)
        after_s = self._after_s[-1:] if said.ended else self._after_s
        for (namespaces, keys), ends in zip(pages, tokens, strict=True):
            for hint, some in said.of_pages(ends, age_s):
                self._send(hint, [(namespaces, [keys[at] for at in some])], after_s)

    def end(self, said: RequestHints, groups: Sequence[Sequence[Namespace]]) -> None:
        """Delete the pages of a session whose last request has ended.

        `groups`: for each group the namespaces of all shards.
        """
        if said.ended and said.session:
            self._begun.pop(said.session, None)
            hint = Hint(HintAction.DELETE, session=said.session)
            self._send(hint, [(namespaces, []) for namespaces in groups], self._after_s[-1:])
