"""Send hints to the store in the background; an engine never waits for them, nor fails by them.

RequestHints --- HintSender --- which pages they are about, and when the session began
|  HintedPages
HintQueue  --- a thread that makes a call for each hint and shard
"""

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
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
WAITING_MAX = 1024  # requests whose hints wait; those of further ones are dropped
WAITING_KEYS_MAX = 1 << 19  # of all their pages: 50 MB
SESSIONS_MAX = 4096

# For each group of layers: the namespaces of all shards, and the keys of the pages, head first.
Pages: TypeAlias = Sequence[tuple[Sequence[Namespace], Sequence[bytes]]]
AT_ONCE = (0.0,)
ALL = range(1 << 32)  # numbers of calls


class HintedPages(NamedTuple):
    """A request's hints, and the pages that they are about.

    `tokens`: for each group a token of each page. `began`: when its session began, on the monotonic
    clock. `over`: only delete the session's own pages.
    """

    hints: RequestHints
    pages: Pages
    tokens: Sequence[Sequence[int]]
    began: float
    over: bool = False

    def calls(self) -> Iterator[tuple[Hint, Namespace, Sequence[bytes]]]:
        """Yield the hints of all shards; thousands of pages take milliseconds."""
        if self.over:
            hint = Hint(HintAction.DELETE, session=self.hints.session)
            for namespace in itertools.chain(*(namespaces for namespaces, _ in self.pages)):
                yield hint, namespace, ()
            return
        age_s = time.monotonic() - self.began
        for (namespaces, keys), tokens in zip(self.pages, self.tokens, strict=True):
            for hint, some in self.hints.of_pages(tokens, age_s):
                chosen = [keys[at] for at in some]
                for namespace in namespaces:
                    yield hint, namespace, chosen


class Send(Protocol):
    """Take hints, and the seconds after which they are sent. Never waits.

    They are sent again, after the next of these seconds, only if pages were refused, such as those
    that were not stored yet.
    """

    def __call__(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Take hints."""


class _Due(NamedTuple):
    """Hints that wait. Times are monotonic."""

    at: float
    number: int  # those that are due together are sent in the order in which they came
    hinted: HintedPages
    again: Sequence[float]
    calls: Container[int]  # numbers of the calls to make

    @property
    def keys(self) -> int:
        return sum(len(keys) for _, keys in self.hinted.pages)


class HintQueue:
    """Send hints one after the other. Thread-safe.

    Its thread starts with the first one. `timeout_s`: of a call.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._thread = ThreadPool(1, "kvstore-hints")
        self._changed = Condition()
        self._due: list[_Due] = []  # a heap
        self._keys = 0  # of these
        self._numbers = itertools.count()
        self._running = False
        self._closed = False
        self.dropped = 0

    def send(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Take hints, as `Send` says."""
        now = time.monotonic()
        first, *again = [now + seconds for seconds in after_s]
        self._put(_Due(first, next(self._numbers), hinted, again, ALL))

    def _put(self, due: _Due) -> None:
        with self._changed:
            full = len(self._due) >= WAITING_MAX or self._keys + due.keys > WAITING_KEYS_MAX
            if self._closed or full:
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
            self._keys += due.keys
            self._changed.notify_all()

    def _run(self) -> None:
        while due := self._next():
            try:
                refused = self._refused(due)
            except Exception:  # the thread goes on with the next request
                log.exception("hints of a request could not be sent")
                continue
            if refused and due.again:
                at, *again = due.again
                self._put(due._replace(at=at, again=again, calls=refused))

    def _next(self) -> _Due | None:
        """Wait for the next hints that are due; None if there are none."""
        with self._changed:
            while self._due and not self._closed:
                left_s = self._due[0].at - time.monotonic()
                if left_s <= 0:
                    due = heapq.heappop(self._due)
                    self._keys -= due.keys
                    return due
                self._changed.wait(left_s)
            self._running = False
            return None

    def _refused(self, due: _Due) -> set[int]:
        """Make the calls, and return those of which the store refused pages."""
        refused = set()
        for number, call in enumerate(due.hinted.calls()):
            if self._closed:
                break
            if number in due.calls and not self._took(*call):
                refused.add(number)
        return refused

    def _took(self, hint: Hint, namespace: Namespace, keys: Sequence[bytes]) -> bool:
        """Send a hint, and return whether the store refused none of the pages."""
        try:
            result = self._client.hint(namespace, keys, hint, self._timeout_s)
        except KVStoreError as error:  # such as an older node
            log.info("a hint was not sent: %s", error)
            return False
        if result.clipped or result.refused:
            log.debug("hint %s: %s", hint.action.name, result)
        return not result.refused

    @property
    def waiting_count(self) -> int:
        """Return of how many requests hints wait."""
        return len(self._due)

    def close(self) -> None:
        """Send nothing more; a running call ends by its deadline."""
        with self._changed:
            self._closed = True
            self.dropped += len(self._due)
            self._due.clear()
            self._keys = 0
            self._changed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)


class HintSender:
    """Add to a request's hints which pages they are about. Used by one thread.

    `send`: where they go. `after_s`: as in `Send`, for all but a session's last request: its hints
    are sent with the last try of others, so that its pages are stored by then.
    """

    def __init__(self, send: Send, after_s: Sequence[float] = AT_ONCE) -> None:
        self._send = send
        self._after_s = after_s
        self._begun: OrderedDict[str, float] = OrderedDict()  # sessions, by their last request

    def begin(self, hints: RequestHints) -> None:
        """Note when a session's first request came: pages stored before are not its own."""
        if hints.session:
            self._begun.setdefault(hints.session, time.monotonic())
            self._begun.move_to_end(hints.session)
            if len(self._begun) > SESSIONS_MAX:
                self._begun.popitem(last=False)

    def send(self, hints: RequestHints, pages: Pages, tokens: Sequence[Sequence[int]]) -> None:
        """Send a request's hints about its pages.

        `tokens`: for each group a token of each page.
        """
        began = self._begun.get(hints.session, time.monotonic())
        after_s = self._after_s[-1:] if hints.ended else self._after_s
        self._send(HintedPages(hints, pages, tokens, began), after_s)

    def end(self, hints: RequestHints, groups: Sequence[Sequence[Namespace]]) -> None:
        """Delete the pages of a session whose last request has ended.

        `groups`: for each group the namespaces of all shards.
        """
        if hints.ended and hints.session:
            began = self._begun.pop(hints.session, 0.0)
            pages: Pages = [(namespaces, ()) for namespaces in groups]
            hinted = HintedPages(hints, pages, [range(0)] * len(groups), began, over=True)
            self._send(hinted, self._after_s[-1:])
