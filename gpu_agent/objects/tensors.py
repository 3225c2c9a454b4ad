"""Store whole tensors of any size by name, as chunks of one size.

    [header | bytes ......][bytes ............][bytes ... zeros]      CHUNK_NBYTES each

A node keeps pages of one size in a namespace, and opens a limited number of namespaces. Outputs of
an encoder have thousands of sizes, so a tensor is cut into chunks, and all of them are in one
namespace. The header says what the tensor is. The names of the other chunks contain its dtype and
shape, so chunks of two tensors under one identifier never meet.

`TensorSaves` copies a tensor and stores it in the background. `objects/tensor_loads.py` reads.
"""

import concurrent.futures
import hashlib
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gpu_agent.objects.parts import ObjectName, ObjectResults
from gpu_agent.objects.store import ANY, ObjectStore
from kvstore.keys import Namespace
from kvstore.layout import DTYPE_NBYTES, PageLayout, opaque_layout
from kvstore.log_rate import LogRate
from kvstore.results import PutOutcome
from kvstore.threads import ThreadPool

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# Small enough that little of a last chunk is empty, large enough that its bookkeeping stays a small
# part of its copy (benchmarks/encoder_outputs.py).
CHUNK_NBYTES = 1 << 20
HEADER_NBYTES = 512
DIMS_MAX = 8
_MAGIC = b"kvtensor"
_HEADER = struct.Struct("<8s32s16sB")  # magic, digest of the identifier, dtype, dimensions
_DIM = struct.Struct("<Q")


class TensorSpec(NamedTuple):
    """Dtype (torch's name) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Return the number of chunks, at least one."""
        return -(-(HEADER_NBYTES + self.nbytes) // CHUNK_NBYTES)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the tensor, offset in the chunk, bytes) of each chunk."""
        at, start = 0, HEADER_NBYTES
        for _ in range(self.chunks):
            nbytes = min(self.nbytes - at, CHUNK_NBYTES - start)
            yield at, start, nbytes
            at, start = at + nbytes, 0


def spec_of(tensor: torch.Tensor) -> TensorSpec | None:
    """Return a tensor's spec; None for one that cannot be stored."""
    spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    storable = spec.dtype in DTYPE_NBYTES and 0 < len(spec.shape) <= DIMS_MAX and spec.nbytes
    return spec if storable else None


def chunk_layout() -> PageLayout:
    """Return the layout of all chunks."""
    return opaque_layout(CHUNK_NBYTES)


def scope_of(namespace: Namespace) -> Namespace:
    """Return a namespace of chunks with its layout left open, as object names have it."""
    return replace(namespace, layout=ANY)


def _digest(identifier: str) -> bytes:
    # A client's name may have halves of surrogate pairs, which JSON can spell
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).digest()


def header(identifier: str, spec: TensorSpec) -> bytes:
    """Return the first HEADER_NBYTES of a tensor's first chunk."""
    text = _HEADER.pack(_MAGIC, _digest(identifier), spec.dtype.encode(), len(spec.shape))
    return (text + b"".join(map(_DIM.pack, spec.shape))).ljust(HEADER_NBYTES, b"\0")


def read_header(identifier: str, chunk: memoryview) -> TensorSpec | None:
    """Return the tensor in a first chunk; None if it is not the identifier's."""
    magic, digest, dtype, dims = _HEADER.unpack_from(chunk)
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    if (magic, digest) != (_MAGIC, _digest(identifier)) or name not in DTYPE_NBYTES:
        return None
    if not 0 < dims <= DIMS_MAX:
        return None
    shape = tuple(_DIM.unpack_from(chunk, _HEADER.size + i * _DIM.size)[0] for i in range(dims))
    return TensorSpec(name, shape)


def chunk_names(scope: Namespace, identifier: str, spec: TensorSpec | None) -> list[ObjectName]:
    """Return the names of a tensor's chunks; without a spec that of the first one only.

    `scope`: the namespace, with the layout left open (`scope_of`).
    """
    first = hashlib.sha256(_MAGIC + _digest(identifier)).digest()
    hashes = [first]
    if spec is not None:
        shape = first + repr(spec).encode()
        hashes += [hashlib.sha256(b"%d " % i + shape).digest() for i in range(1, spec.chunks)]
    return [ObjectName(scope, one, chunk_layout()) for one in hashes]


class ChunkPool:
    """Slots of CHUNK_NBYTES in one block of host memory. Thread-safe.

    `memory`: `[slots, CHUNK_NBYTES]`, uint8.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.rows = memory
        self._views = [memoryview(row.numpy()) for row in memory]
        self._lock = threading.Lock()
        self._free = list(range(len(memory)))

    def __len__(self) -> int:
        return len(self._views)

    @property
    def free(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return `count` slots; None if fewer are free."""
        with self._lock:
            if count > len(self._free):
                return None
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
            return taken

    def give(self, slots: Sequence[int]) -> None:
        """Free slots."""
        with self._lock:
            self._free += slots

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the memory of slots."""
        return [self._views[slot] for slot in slots]


@dataclass
class SaveStats:
    """Counters of tensors. `dropped`: no free buffer; `failed`: the store did not take all."""

    saved: int = 0
    dropped: int = 0
    failed: int = 0


class TensorSaves:
    """Store tensors in the background.

    Call `save` in the engine's thread. It copies a GPU's tensor on a stream of its own and never
    waits. The buffers bound the memory: a tensor without free slots is dropped. The store is not
    closed here.
    """

    def __init__(self, store: ObjectStore, namespace: Namespace, memory: torch.Tensor) -> None:
        self.stats = SaveStats()
        self._store, self._scope = store, scope_of(namespace)
        self._pool = ChunkPool(memory)
        self._threads = ThreadPool(1, "kvstore-encoder-saves")
        self._stream: Any = None
        self._lock = threading.Lock()  # guards the counters

    def save(self, identifier: str, tensor: torch.Tensor) -> None:
        """Begin to store a tensor, whose memory nobody overwrites until it is freed."""
        spec = spec_of(tensor)
        slots = self._pool.take(spec.chunks) if spec else None
        if spec is None or slots is None:
            self._count("dropped")
            return
        try:
            copied = self._copy(tensor.detach(), spec, slots)
            self._threads.submit(self._send, identifier, spec, slots, copied)
        except (RuntimeError, MemoryError) as error:  # of the GPU, too; or no thread starts
            log.warning("an encoder's output was not saved: %s", error)
            self._end(slots, "dropped")

    def _copy(
        self, tensor: torch.Tensor, spec: TensorSpec, slots: list[int]
    ) -> Callable[[], object]:
        """Begin to copy the tensor; return what waits for the copy, in another thread."""
        rows = self._pool.rows

        def copy(flat: torch.Tensor) -> None:
            for slot, (at, start, nbytes) in zip(slots, spec.pieces(), strict=True):
                rows[slot, start : start + nbytes].copy_(flat[at : at + nbytes], non_blocking=True)

        if tensor.device.type != "cuda":
            # Nothing overwrites the tensor, so the copy need not be made in the engine's thread
            return lambda: copy(_bytes_of(tensor))
        flat, device = _bytes_of(tensor), tensor.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy(flat)
            done.record(self._stream)

        def wait(kept: torch.Tensor) -> None:
            done.synchronize()

        return partial(wait, flat)  # holds the memory until the copy is done

    def _send(
        self, identifier: str, spec: TensorSpec, slots: list[int], copied: Callable[[], object]
    ) -> None:
        try:
            copied()
            views = self._pool.views(slots)
            views[0][:HEADER_NBYTES] = header(identifier, spec)
            *_, (_, start, nbytes) = spec.pieces()
            views[-1][start + nbytes :] = bytes(CHUNK_NBYTES - start - nbytes)
            done = self._store.put(chunk_names(self._scope, identifier, spec), views)
        except Exception:  # an error of the GPU: the engine finds it itself
            log.exception("an encoder's output was not saved")
            self._end(slots, "failed")
            return
        done.add_done_callback(partial(self._sent, slots))

    def _sent(
        self,
        slots: list[int],
        done: "concurrent.futures.Future[ObjectResults[PutOutcome | None]]",
    ) -> None:
        stored = (PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BUSY)
        kept = all(outcome in stored for outcome in done.result().values)
        self._end(slots, "saved" if kept else "failed")

    def _end(self, slots: list[int], counter: str) -> None:
        self._pool.give(slots)
        self._count(counter)

    def _count(self, counter: str) -> None:
        with self._lock:
            setattr(self.stats, counter, getattr(self.stats, counter) + 1)

    @property
    def pending(self) -> int:
        """Return the chunks that are being saved."""
        return len(self._pool) - self._pool.free

    def close(self) -> None:
        """Wait for copies. Call it before the store is closed, which ends the puts."""
        self._threads.shutdown(wait=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
