"""How a part's objects travel between callers' memory and a node.

What is read is received elsewhere, compared with its checksum there, and copied only then: from the node's
mapped memory with the shared-memory wire, through a buffer with the others.
"""

import logging
import threading
from collections.abc import Sequence

import torch

from gpu_agent.objects.parts import Part, runs
from kvstore.buffers import byte_view, copy
from kvstore.checksum import checksum, key_seed
from kvstore.client import Client
from kvstore.errors import KVStoreError, Unavailable
from kvstore.log_rate import LogRate
from kvstore.results import PutOutcome

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# Received at once into a buffer: what stays in a core's cache until it is copied.
RECEIVED_NBYTES = 4 << 20


class ObjectMover:
    """Thread-safe. Methods raise KVStoreErrors; `values` then tells what was done before. A view is not touched
    any more when they return, nor written after the part's deadline or when `stopping` is set."""

    def __init__(self, client: Client, stopping: threading.Event) -> None:
        self._client = client
        self._stopping = stopping
        self._lock = threading.Lock()
        self._damaged_count = 0

    @property
    def damaged_count(self) -> int:
        """Objects found damaged in a node's mapped memory; the client counts those that it received."""
        return self._damaged_count

    def put(self, part: Part, values: list[PutOutcome | None]) -> None:
        self._client.open(part.namespace, part.deadline.remaining())  # so that it is known how objects travel
        views: dict[bytes, memoryview] = dict(zip(part.hashes, part.views, strict=True))  # each once
        timeout_s = part.deadline.remaining()
        outcomes = self._client.put(part.namespace, list(views), list(views.values()), timeout_s=timeout_s)
        by_hash = dict(zip(views, outcomes, strict=True))
        values[:] = [by_hash[prefix_hash] for prefix_hash in part.hashes]

    def get(self, part: Part, values: list[bool | None], buffer: torch.Tensor) -> None:
        """`buffer`: bytes, any number; a larger object gets memory of its own, which is slower."""
        self._client.open(part.namespace, part.deadline.remaining())
        every = range(len(part.hashes))
        if self._client.maps_arena:
            step = self._client.batch_pages_max(part.namespace, part.deadline.remaining())
            for some in runs(every, step):
                self._get_in_place(part, some, values)
            return
        nbytes = part.namespace.layout.page_nbytes
        if nbytes > buffer.numel():
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        room = byte_view(buffer.view(-1))
        for some in runs(every, max(1, min(RECEIVED_NBYTES, room.nbytes) // nbytes)):
            self._get_buffered(part, some, values, room)

    def _get_in_place(self, part: Part, some: Sequence[int], values: list[bool | None]) -> None:
        hashes = [part.hashes[i] for i in some]
        damaged = []
        with self._client.open_get(part.namespace, hashes, timeout_s=part.deadline.remaining()) as slots:
            found = [i for i, hit in zip(some, slots.hits, strict=True) if hit]
            for i in set(some) - set(found):
                values[i] = False
            for i, page, expected, offset in zip(found, slots.pages, slots.checksums, slots.offsets, strict=True):
                if checksum(page, key_seed(part.namespace.digest, part.hashes[i])) != expected:
                    damaged.append(part.hashes[i])
                    values[i] = False
                    continue
                self._hand_over(part, i, slots.arena.memory, offset)
                values[i] = True
        if damaged:
            self._report(part, damaged)

    def _get_buffered(self, part: Part, some: Sequence[int], values: list[bool | None], room: memoryview) -> None:
        nbytes = part.namespace.layout.page_nbytes
        hashes = [part.hashes[i] for i in some]
        buffers = [room[start : start + nbytes] for start in range(0, len(some) * nbytes, nbytes)]
        hits = self._client.get(part.namespace, hashes, buffers, timeout_s=part.deadline.remaining())
        for place, (i, hit) in enumerate(zip(some, hits, strict=True)):
            if hit:
                self._hand_over(part, i, room, place * nbytes)
            values[i] = hit

    def _hand_over(self, part: Part, i: int, source: memoryview, offset: int) -> None:
        """Copies verified bytes into the caller's view, unless it is too late for that."""
        part.deadline.remaining()
        if self._stopping.is_set():
            raise Unavailable("the agent is closed")
        view = part.views[i]
        assert view.nbytes == part.namespace.layout.page_nbytes
        copy(view, source[offset : offset + view.nbytes])

    def _report(self, part: Part, damaged: list[bytes]) -> None:
        """The node checks its copies and drops bad ones; whatever it says, they were misses."""
        log.error("%d objects of model %s did not match their checksum", len(damaged), part.namespace.model)
        with self._lock:
            self._damaged_count += len(damaged)
        try:
            self._client.verify(part.namespace, list(dict.fromkeys(damaged)), timeout_s=part.deadline.remaining())
        except KVStoreError as error:
            log.warning("could not report damaged objects: %s", error)
