"""Well-behaved clients next to attackers: they record latency, errors and wrong bytes.

    python innocents.py '{"wire": "bulk", "address": "127.0.0.1:7440", ...}'

The JSON has fields of ClientConfig, and `pause_s`.

The process prints `ready` when its pages are stored. For each input line it prints the calls since
the last line, as a JSON list of Call. It exits when its standard input ends.
"""

import json
import sys
import threading
import time
from typing import Any, NamedTuple

from kvstore import Client, ClientConfig, KVStoreError, Namespace, opaque_layout
from kvstore.tools.trace import page_content

KEYS = 16
PAGE_NBYTES = 1 << 20
PAUSE_S = 0.01  # between pairs of a lookup and a get
BEGIN_S = 60.0  # to store the pages on a busy machine


class Call(NamedTuple):
    """A finished call.

    `began` is a time of the monotonic clock, which all processes of a machine share. `error` is
    empty if the call succeeded with the right bytes.
    """

    began: float
    op: str
    seconds: float
    error: str = ""


class Innocent:
    """A client thread that repeatedly looks up 16 keys and gets a page of 1 MiB."""

    def __init__(self, pause_s: float = PAUSE_S, **settings: Any) -> None:
        config = ClientConfig(**{"connect_timeout_s": 2.0, "backoff_s_max": 0.1, **settings})
        self._client, self._pause_s, self.wire = Client(config), pause_s, config.wire
        self._namespace = Namespace(
            f"innocent by {config.wire}", opaque_layout(PAGE_NBYTES), config.tenant or "default"
        )
        self._keys = [number.to_bytes(32, "big") for number in range(KEYS)]
        digest = self._namespace.digest
        self._pages = [page_content(digest, key, PAGE_NBYTES) for key in self._keys]
        self._buffer = bytearray(PAGE_NBYTES)
        self._lock, self._calls, self._over = threading.Lock(), list[Call](), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        """Store the pages and start the thread.

        Raises KVStoreError.
        """
        self._client.put(self._namespace, self._keys, self._pages, timeout_s=BEGIN_S)
        self._thread.start()

    def take(self) -> list[Call]:
        """Return the calls that ended since the last call of this method."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        number = 0
        while not self._over.wait(self._pause_s):
            self._measure("lookup", self._lookup, number)
            # The result of an earlier get must not be mistaken for this one's
            self._buffer[:] = bytes(PAGE_NBYTES)
            self._measure("get", self._get, number)
            number = (number + 1) % KEYS

    def _measure(self, op: str, call: Any, number: int) -> None:
        error, began = "", time.monotonic()
        try:
            call(number)
        except KVStoreError as caught:
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - began
        if op == "get" and not error and self._buffer != self._pages[number]:
            error = "wrong bytes"
        with self._lock:
            self._calls.append(Call(began, op, seconds, error))

    def _lookup(self, number: int) -> None:
        found = self._client.lookup(self._namespace, self._keys).prefix_pages
        if found != KEYS:
            raise KVStoreError(f"{found} of {KEYS} keys are found")

    def _get(self, number: int) -> None:
        if self._client.get(self._namespace, self._keys[number : number + 1], [self._buffer]) != [
            True
        ]:
            raise KVStoreError("the page is not found")


def main() -> None:
    innocent = Innocent(**json.loads(sys.argv[1]))
    innocent.begin()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(innocent.take()), flush=True)
    innocent.end()


if __name__ == "__main__":
    main()
