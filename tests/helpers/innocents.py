"""Clients that do no harm, beside those that do: how long their calls take, which fail, and whether
bytes are right.

    python innocents.py '{"wire": "bulk", "address": "127.0.0.1:7440", ...}'

The JSON has fields of ClientConfig, and `pause_s`.

As a process it prints `ready` when its pages are stored, the calls since the last time for each
line that it reads (a JSON list of Call), and ends with its standard input.
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
PAUSE_S = 0.01  # after a lookup and a get
BEGIN_S = 60.0  # to store the pages; on a busy machine that takes long


class Call(NamedTuple):
    """`began` is of the monotonic clock, which all processes of a machine share.

    `error` is empty if all was right.
    """

    began: float
    op: str
    seconds: float
    error: str = ""


class Innocent:
    """One client that looks up 16 keys and gets a page of 1 MiB, again and again, on a thread of
    its own.
    """

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
        """Store the pages, then go on without end.

        Raises KVStoreError.
        """
        self._client.put(self._namespace, self._keys, self._pages, timeout_s=BEGIN_S)
        self._thread.start()

    def take(self) -> list[Call]:
        """Return the calls that ended since the last time."""
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
            # What an earlier get left must not pass for this one's
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
