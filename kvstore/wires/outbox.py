"""Frames on their way from the thread that makes them to gRPC's, which sends them."""

import queue
import threading
from collections.abc import Iterator

FRAMES_MAX = 2  # that wait to be sent: while one is sent the next one is made


class Outbox:
    """One thread puts, another iterates, any may `end` it. What a frame is made of is read by who puts it alone, so
    a call that is over touches it no more, however it ended."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(FRAMES_MAX)
        self._ended = False

    def put(self, frame: bytes) -> bool:
        """Waits for room. False: nobody takes it, because it was ended."""
        self._room.acquire()
        if self._ended:
            self._room.release()  # the next one does not wait either
            return False
        self._frames.put(frame)
        return True

    def end(self, *_: object) -> None:
        """No more frames come, or nobody sends them."""
        self._ended = True
        self._room.release()
        self._frames.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (frame := self._frames.get()) is not None:
            self._room.release()
            yield frame
