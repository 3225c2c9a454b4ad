"""Define the batches that transport benchmarks put and get, and this project's contender."""

import itertools
import os
import secrets
from collections.abc import Callable, Iterator

from measure import Samples, timed

from kvstore import Client, Namespace, PutOutcome
from kvstore.checksum import LEAF_SUM_NBYTES, cuts
from kvstore.layout import opaque_layout

# Bytes of the pages, of the slots and of the buffers: more than the caches of one core of current
# machines, so that no cache has them from the previous turn.
MOVED_NBYTES = 128 << 20
TURN = 5  # batches that a contender moves in its turn


class Batch:
    """The pages that every contender stores, and the buffers that they are read into.

    `number`: index among its Batches.
    """

    def __init__(self, namespace: Namespace, page_nbytes: int, count: int, number: int = 0) -> None:
        self.namespace = namespace
        self.page_nbytes = page_nbytes
        self.number = number
        self.pages = [os.urandom(page_nbytes) for _ in range(count)]
        self.buffers = [bytearray(page_nbytes) for _ in range(count)]
        self.hashes = [secrets.token_bytes(32) for _ in range(count)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the batch."""
        return self.page_nbytes * len(self.pages)


class Batches:
    """Batches of `count` pages, `moved_nbytes` in all.

    Contenders use them in turn, each from the first on, and store each in another place: all
    contenders move through the same amount of memory, and no cache holds it.
    """

    def __init__(self, page_nbytes: int, count: int, moved_nbytes: int = MOVED_NBYTES) -> None:
        self.page_nbytes = page_nbytes
        namespace = Namespace(model="benchmark", layout=opaque_layout(page_nbytes))
        numbers = range(max(1, moved_nbytes // (page_nbytes * count)))
        self.all = [Batch(namespace, page_nbytes, count, number) for number in numbers]

    @property
    def nbytes(self) -> int:
        """Return the bytes of one batch."""
        return self.all[0].nbytes

    def cycle(self) -> Iterator[Batch]:
        """Yield the batches in turns, without end."""
        return itertools.cycle(self.all)

    def forget(self, client: Client) -> None:
        """Remove what was stored."""
        for batch in self.all:
            client.remove(batch.namespace, batch.hashes)


Contender = Callable[[Batch], Samples]


def turn(contender: Contender, cycle: Iterator[Batch], into_buffers: bool = True) -> Samples:
    """Run a contender a few times after a warm-up; check the bytes that come back.

    `into_buffers`: whether they come back in the batch's buffers.
    """
    batch = next(cycle)
    for buffer in batch.buffers:
        buffer[:] = bytes(len(buffer))  # bytes of an earlier turn could pass as this one's
    contender(batch)
    assert not into_buffers or batch.buffers == batch.pages, (
        "the bytes that came back are not those that were sent"
    )
    samples = [contender(next(cycle)) for _ in range(TURN - 1)]
    return {op: [seconds for sample in samples for seconds in sample[op]] for op in samples[0]}


class NoChecksum:
    """Replace `kvstore.checksum.Leaves` at almost no cost."""

    def __init__(self, page_nbytes: int) -> None:
        self._count = len(cuts(page_nbytes))

    def update(self, chunk: memoryview) -> None:
        """Ignore the bytes."""
        pass

    def digest(self) -> bytes:
        """Return zeros."""
        return bytes(LEAF_SUM_NBYTES * self._count)


def put(client: Client, batch: Batch) -> None:
    """Put a batch."""
    assert set(client.put(batch.namespace, batch.hashes, batch.pages)) == {PutOutcome.STORED}


def get(client: Client, batch: Batch) -> None:
    """Get a batch."""
    assert all(client.get(batch.namespace, batch.hashes, batch.buffers))


def ours(client: Client, batch: Batch) -> Samples:
    """Time one put and one get.

    The pages of the previous turn are removed first, so that each put writes. They stay until then,
    so that the next batch gets other slots.
    """
    client.remove(batch.namespace, batch.hashes)
    return {"put": [timed(lambda: put(client, batch))], "get": [timed(lambda: get(client, batch))]}
