"""What a node is asked about its disk: to write all that is in RAM, to verify, to believe in it again."""

import time
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from node.disk.durability import Durability
from node.disk.scrub import scrub
from node.serve.limits import SCRUB_NBYTES_MAX, SCRUB_S_MAX


class Waiting(Protocol):
    """Who asks; `gone`: nobody waits for the answer any more."""

    @property
    def gone(self) -> Callable[[], bool]: ...


class DiskCalls:
    """Thread-safe. Each raises InvalidRequest at a node without a disk."""

    def __init__(self, durability: Durability, stops: Callable[[], bool]) -> None:
        """`stops`: whether the node does."""
        self._durability = durability
        self._stops = stops

    def flush(self, request: pb.FlushRequest, caller: Waiting) -> pb.FlushReply:
        self._durability.flush(self._durability.begin_wait(request.wait_ms, caller.gone))
        return pb.FlushReply(pages_on_disk=self._durability.disk.records.count)

    def scrub(self, request: pb.ScrubRequest, caller: Waiting) -> pb.ScrubReply:
        """A stretch that is bounded in bytes and time; the caller goes on from the cursor."""
        nbytes_max = min(request.nbytes_max or SCRUB_NBYTES_MAX, SCRUB_NBYTES_MAX)
        end = time.monotonic() + SCRUB_S_MAX

        def enough() -> bool:
            return time.monotonic() >= end or caller.gone() or self._stops()

        try:
            result = scrub(self._durability.disk, request.cursor, nbytes_max, enough)
        except OSError as error:
            self._durability.disk.blame("scrubbing", error)
            raise Exhausted(f"not all pages were read: {error}") from error
        return pb.ScrubReply(**result._asdict())

    def recover(self, request: pb.RecoverRequest, caller: Waiting) -> pb.RecoverReply:
        try:
            self._durability.disk.recover()
        except OSError as error:
            raise Exhausted(f"the disk still fails, pages are served from RAM: {error}") from error
        return pb.RecoverReply()
