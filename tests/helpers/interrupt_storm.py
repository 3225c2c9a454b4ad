"""A child process with a client whose main thread is repeatedly interrupted during its calls.

    python interrupt_storm.py ADDRESS WIRE INTERRUPTS SEED PAGE_NBYTES

Other threads make calls with deadlines meanwhile. A watchdog ends the process with a traceback if
it hangs. At the end the process prints "calm", and keeps its connections until its standard input
ends.
"""

import contextlib
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.deadline import Deadline

CONNECTIONS = 4
CALL_S = 20.0  # deadline of a call, long enough for a starved machine
PAGES = 4
REUSED_S = 0.002  # for late writes of an interrupted call to show
# Limit for each hundred interrupts, and for the checks at the end
WATCHDOG_S = float(os.environ.get("WATCHDOG_S", "120"))


class Abort(BaseException):
    """A BaseException that is no Exception, as some engines raise."""


class Alarm(Exception):
    """An exception as raised by programs that limit their run time."""


KINDS = (KeyboardInterrupt, Abort, Alarm)


class Storm:
    """Signals for the main thread: one after a random delay, and up to two more right after it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = self.raised = 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def begin(self, seconds: float) -> None:
        self.left = self.random.choice((1, 1, 2, 3))
        signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-6, seconds))

    def _interrupt(self, *_: object) -> None:
        if self.left > 0:
            self.left -= 1
            self.raised += 1
            if self.left:
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-6, 2e-4))
            raise self.random.choice(KINDS)


class Calls:
    """The calls of one thread; each compares the bytes that it gets."""

    def __init__(self, client: Client, namespace: Namespace, seed: int) -> None:
        self.client, self.namespace, self.seed = client, namespace, seed
        self.nbytes = namespace.layout.page_nbytes
        self.number = 0
        self.keys = [key(number) for number in range(PAGES)]
        self.buffers = [bytearray(self.nbytes) for _ in self.keys]

    def one(self) -> None:
        self.number += 1
        match self.number % 4:
            case 0:
                fresh = key(1000 + self.seed, self.number)
                self.client.put(
                    self.namespace, [fresh], [content(fresh, self.nbytes)], timeout_s=CALL_S
                )
            case 1:
                found = self.client.lookup(self.namespace, self.keys, timeout_s=CALL_S)
                assert found.present == (True,) * PAGES, found
            case 2 if self.client.maps_arena and self.number % 8 == 2:
                with self.client.open_get(self.namespace, self.keys, timeout_s=CALL_S) as slots:
                    for one, page in zip(self.keys, slots.pages, strict=True):
                        assert page == content(one, self.nbytes), "wrong bytes in place"
                    del page
            case _:
                hits = self.client.get(self.namespace, self.keys, self.buffers, timeout_s=CALL_S)
                assert hits == [True] * PAGES, hits
                for one, buffer in zip(self.keys, self.buffers, strict=True):
                    assert buffer == content(one, self.nbytes), "wrong bytes"

    def reuse_buffers(self) -> None:
        """Overwrite the buffers of an ended call, and check that nothing is written to them."""
        theirs = b"\xee" * self.nbytes
        for buffer in self.buffers:
            buffer[:] = theirs
        time.sleep(REUSED_S)
        assert all(buffer == theirs for buffer in self.buffers), (
            "a buffer was written to after the call"
        )


def key(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers).rjust(32, b"k")


def content(of: bytes, nbytes: int) -> bytes:
    return (of * (nbytes // len(of) + 1))[:nbytes]


def run(client: Client, namespace: Namespace, interrupts: int, seed: int) -> None:
    storm, calls, over = Storm(seed), Calls(client, namespace, 0), [False]
    ended: list[BaseException | None] = []

    def others(number: int) -> None:
        error: BaseException | None = None
        mine = Calls(client, namespace, number)
        try:
            while not over[0]:
                mine.one()
                time.sleep(0.001)
        except BaseException as failed:
            error = failed
            raise
        finally:
            ended.append(error)

    seconds = took(calls)
    threads = [threading.Thread(target=others, args=(number,), daemon=True) for number in (1, 2)]
    for thread in threads:
        thread.start()
    while storm.raised < interrupts:
        try:
            interrupted(storm, calls, seconds, interrupts)
        except KINDS:  # raised inside the handler of another
            storm.left = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    over[0] = True
    while len(ended) < len(threads):
        time.sleep(0.01)
    assert ended == [None, None], ended
    print(f"interrupts {storm.raised}", file=sys.stderr, flush=True)
    in_time(Calls(client, namespace, 5).one)
    afterwards(client, namespace)


def interrupted(storm: Storm, calls: Calls, seconds: float, interrupts: int) -> None:
    shown = storm.raised
    while storm.raised < interrupts:
        if storm.raised >= shown:
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            shown += 100
        try:
            storm.begin(1.3 * seconds)
            calls.one()
            storm.left = 0
        except KINDS:
            storm.left = 0  # must come first: a pending signal is handled at the next call
            calls.reuse_buffers()


def took(calls: Calls) -> float:
    """Return the approximate seconds of a call."""
    began = time.monotonic()
    for _ in range(20):
        calls.one()
    return (time.monotonic() - began) / 20


def in_time(call: Callable[[], None]) -> None:
    for _ in range(4):
        began = time.monotonic()
        call()
        assert time.monotonic() - began < CALL_S, "a call missed its deadline"


def afterwards(client: Client, namespace: Namespace) -> None:
    """Check that no slot of the connection pool is lost and that new threads are served."""
    for node in client._fan_out.nodes.all().values():
        wire: Any = node.connection.wire  # type: ignore[union-attr]
        if wire.name != "grpc":
            with contextlib.ExitStack() as stack:
                for _ in range(CONNECTIONS):
                    stack.enter_context(wire._pool.connection(Deadline(CALL_S)))
    ended: list[int] = []

    def another(number: int) -> None:
        in_time(Calls(client, namespace, number).one)
        ended.append(number)

    threads = [
        threading.Thread(target=another, args=(10 + number,), daemon=True) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CALL_S * 5)
    assert len(ended) == 3, "a thread's calls failed"


def main() -> None:
    address, wire, interrupts, seed, page_nbytes = sys.argv[1:]
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    sys.unraisablehook = lambda _: None  # ignore interrupts where Python cannot raise them
    sys.setswitchinterval(1e-4)
    namespace = Namespace(model="storm", layout=opaque_layout(int(page_nbytes)))
    settings = {"timeout_s": CALL_S, "connect_timeout_s": CALL_S, "connections_max": CONNECTIONS}
    client = Client(ClientConfig(address, wire=wire, **settings))  # type: ignore[arg-type]
    keys = [key(number) for number in range(PAGES)]
    client.put(namespace, keys, [content(one, namespace.layout.page_nbytes) for one in keys])
    run(client, namespace, int(interrupts), int(seed))
    print("calm", flush=True)
    sys.stdin.read()
    client.close()
    faulthandler.cancel_dump_traceback_later()
    print("closed", flush=True)


main()
