"""A batch of pages that the benchmarks of the wires put and get, and our side of it."""

import os
import secrets

from measure import Samples, timed

from kvstore import Client, Namespace, PutOutcome
from kvstore.checksum import CHECKSUM_NBYTES
from kvstore.layout import opaque_layout


class Batch:
    """The pages every contender stores, and the buffers they come back into."""

    def __init__(self, page_nbytes: int, count: int) -> None:
        self.page_nbytes = page_nbytes
        self.pages = [os.urandom(page_nbytes) for _ in range(count)]
        self.buffers = [bytearray(page_nbytes) for _ in range(count)]
        self.hashes = [secrets.token_bytes(32) for _ in range(count)]
        self.namespace = Namespace(model="benchmark", layout=opaque_layout(page_nbytes))

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * len(self.pages)


class NoChecksum:
    """Takes the place of a running checksum and costs next to nothing."""

    def __init__(self, seed: int) -> None:
        pass

    def update(self, chunk: memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(CHECKSUM_NBYTES)


def ours(client: Client, batch: Batch) -> Samples:
    """One put and one get; the pages are removed after it, so that each put really writes."""

    def put() -> None:
        assert set(client.put(batch.namespace, batch.hashes, batch.pages)) == {PutOutcome.STORED}

    def get() -> None:
        assert all(client.get(batch.namespace, batch.hashes, batch.buffers))

    try:
        return {"put": [timed(put)], "get": [timed(get)]}
    finally:
        client.remove(batch.namespace, batch.hashes)
