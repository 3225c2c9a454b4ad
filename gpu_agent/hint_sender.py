"""Send hints to the store in the background; the engine never waits for them, nor fails by them."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from gpu_agent.hints import RequestHints
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.results.hints import Hint, HintAction
from kvstore.threads import ThreadPool

log = logging.getLogger(__name__)
log.addFilter(LogRate())
WAITING_MAX = 256  # further ones are dropped
SESSIONS_MAX = 4096


class HintSender:
    """Sends the hints of requests about pages of one namespace, one after the other.

    Used by one thread. Its own thread starts with the first hint.
    """

    def __init__(self, client: Client, namespace: Namespace, timeout_s: float) -> None:
        self._client = client
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._thread = ThreadPool(1, "kvstore-hints")
        self._waiting: deque[None] = deque()  # one entry for each
        self._begun: OrderedDict[str, float] = OrderedDict()  # sessions, by their last request
        self.dropped = 0

    def begin(self, hints: RequestHints) -> None:
        """Note when a session's first request came: pages stored before are not its own."""
        if hints.session:
            self._begun.setdefault(hints.session, time.monotonic())
            self._begun.move_to_end(hints.session)
            if len(self._begun) > SESSIONS_MAX:
                self._begun.popitem(last=False)

    def send(self, hints: RequestHints, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Send what a request says about a chain that is stored now.

        `tokens`: a token of each page.
        """
        now = time.monotonic()
        age_s = now - self._begun.get(hints.session, now)
        for hint, some in hints.of_pages(tokens, age_s):
            self._submit(hint, [keys[at] for at in some])

    def end(self, hints: RequestHints) -> None:
        """Delete the pages of a session whose last request has ended."""
        if hints.ended and hints.session:
            self._begun.pop(hints.session, None)
            self._submit(Hint(HintAction.DELETE, session=hints.session), [])

    def _submit(self, hint: Hint, keys: list[bytes]) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append(None)
        try:
            self._thread.submit(self._send, hint, keys)
        except RuntimeError:  # closed, or no thread is left
            self._waiting.pop()
            self.dropped += 1

    def _send(self, hint: Hint, keys: list[bytes]) -> None:
        self._waiting.pop()
        try:
            result = self._client.hint(self._namespace, keys, hint, self._timeout_s)
        except KVStoreError as error:  # such as an older node
            log.info("a hint was not sent: %s", error)
            return
        if result.clipped or result.refused:
            log.debug("hint %s: %s", hint.action.name, result)

    def close(self) -> None:
        """Send nothing more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
