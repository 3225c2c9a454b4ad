"""Run chats of one tenant against a cluster until SIGTERM, for `make demo-operate`.

Each request looks up its pages, loads the leading hits, compares every byte with what was stored
and stores the other pages. Address, TLS and token come from the environment, as in an engine.

Each second it prints one JSON object of the sums so far:

    requests pages_asked pages_hit pages_wrong pages_refused errors late_s last_error

An error of a call is counted, and the chat goes on. `late_s` is the longest call, in seconds.
"""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TypeVar

from kvstore import Client, KVStoreError, Namespace, opaque_layout
from kvstore.results import LookupResult
from kvstore.tools.trace import TraceRequest, chatting, page_content, trace_prefix_hash

Result = TypeVar("Result")
CHATS = 24
REQUESTS_MAX = 1_000_000
EVERY_S = 1.0


@dataclass
class Sums:
    """The sums that are printed."""

    requests: int = 0
    pages_asked: int = 0
    pages_hit: int = 0
    pages_wrong: int = 0
    pages_refused: int = 0
    errors: int = 0
    late_s: float = 0.0
    last_error: str = ""


class Chats:
    """The requests of one client, each verified byte by byte."""

    def __init__(self, client: Client, page_nbytes: int) -> None:
        self.sums = Sums()
        self._client = client
        self.namespace = Namespace("demo-operate", opaque_layout(page_nbytes), client.tenant)
        self._buffers: list[bytearray] = []

    def run(self, request: TraceRequest) -> None:
        """Look up, load and verify the pages of a request, and store those that were missing."""
        sums, keys = self.sums, [trace_prefix_hash(number) for number in request.hash_ids]
        nothing = LookupResult(0, (False,) * len(keys))
        found = self._call(lambda: self._client.lookup(self.namespace, keys), nothing).prefix_pages
        hits = self._load(keys[:found]) if found else 0
        if missing := keys[hits:]:
            pages = [self._content(key) for key in missing]
            outcomes = self._call(lambda: self._client.put(self.namespace, missing, pages), [])
            sums.pages_refused += sum(not outcome.kept for outcome in outcomes)
        sums.requests += 1
        sums.pages_asked += len(keys)
        sums.pages_hit += hits

    def _load(self, keys: list[bytes]) -> int:
        """Load pages and return the length of the leading run of hits."""
        nbytes = self.namespace.layout.page_nbytes
        while len(self._buffers) < len(keys):
            self._buffers.append(bytearray(nbytes))
        buffers = self._buffers[: len(keys)]
        loaded = self._call(
            lambda: self._client.get(self.namespace, keys, buffers, prefix=True), []
        )
        for key, hit, buffer in zip(keys, loaded, buffers, strict=False):
            self.sums.pages_wrong += bool(hit) and buffer != self._content(key)
        return next((index for index, hit in enumerate(loaded) if not hit), len(loaded))

    def _content(self, key: bytes) -> bytes:
        return page_content(self.namespace.digest, key, self.namespace.layout.page_nbytes)

    def _call(self, call: Callable[[], Result], instead: Result) -> Result:
        """Run a call; count its error and return `instead`, as an engine that then computes."""
        start = time.monotonic()
        try:
            return call()
        except KVStoreError as error:
            self.sums.errors += 1
            self.sums.last_error = f"{type(error).__name__}: {error}"
            return instead
        finally:
            self.sums.late_s = max(self.sums.late_s, time.monotonic() - start)


def requests(count: int | None) -> Iterator[TraceRequest]:
    """Yield the requests: chats that grow, start again, and share system prompts."""
    return islice(chatting(REQUESTS_MAX, at_a_time=CHATS), count)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--page-kib", type=int, default=16, help="size of each page (%(default)s)")
    found.add_argument("--pause-s", type=float, default=0.02, help="after a request (%(default)s)")
    found.add_argument("--requests", type=int, help="end after so many")
    return found


def main(argv: list[str]) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with Client() as client:
        chats, shown_s = Chats(client, args.page_kib << 10), time.monotonic()
        for request in requests(args.requests):
            if stopped.wait(args.pause_s):
                break
            chats.run(request)
            if time.monotonic() - shown_s >= EVERY_S:
                shown_s = time.monotonic()
                print(json.dumps(asdict(chats.sums)), flush=True)
        print(json.dumps(asdict(chats.sums)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
