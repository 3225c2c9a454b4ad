"""Define the batches that transport benchmarks put and get, and our side of them."""

import itertools
import os
import secrets
from collections.abc import Callable, Iterator

from measure import Samples, timed

from kvstore import Client, Namespace, PutOutcome
from kvstore.checksum import LEAF_SUM_NBYTES, cuts
from kvstore.layout import opaque_layout

# Pages, slots and buffers are each as much as this: more than a core has of the caches of the
# machines that we know, so that nobody's bytes are still there from the time before.
MOVED_NBYTES = 128 << 20
TURN = 5  # batches a contender moves before it is another's turn


class Batch:
    """The pages every contender stores, and the buffers they come back into.

    `number`: among its Batches.
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
    """As many of `count` pages as make `moved_nbytes`.

    Contenders take them in turn, each from the first on, and put each in a place of its own: all
    move through the same amount of memory, and no cache holds it.
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

    `into_buffers`: there the bytes come back.
    """
    batch = next(cycle)
    for buffer in batch.buffers:
        buffer[:] = bytes(len(buffer))  # what an earlier turn left could pass for this one's
    contender(batch)
    assert not into_buffers or batch.buffers == batch.pages, (
        "the bytes that came back are not those that were sent"
    )
    samples = [contender(next(cycle)) for _ in range(TURN - 1)]
    return {op: [seconds for sample in samples for seconds in sample[op]] for op in samples[0]}


class NoChecksum:
    """Takes the place of `kvstore.checksum.Leaves` and costs next to nothing."""

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

    The pages of the time before are removed first, so that each put really writes; they stay until
    then, so that the next batch gets slots of its own.
    """
    client.remove(batch.namespace, batch.hashes)
    return {"put": [timed(lambda: put(client, batch))], "get": [timed(lambda: get(client, batch))]}
