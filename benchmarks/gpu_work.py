"""Define what benchmarks/transfer.py moves: pools, pages and the check of their bytes."""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_agent import KVPool, TorchTransfer, Transfer, UnitTable
from kvstore import Client, LayerGroup, Namespace, PageLayout, Plane

PAGE_TOKENS = 64
SLOT_ALIGN_NBYTES = 4096  # where an arena's slots begin
POISON = 0xA5
LOCK_S = 60.0


@dataclass(frozen=True)
class Shape:
    """Planes of one engine's cache: `planes` tensors of `unit` per layer, 64 tokens a page."""

    name: str
    layers: int
    planes: tuple[str, ...]
    dtype: str
    unit: tuple[int, ...]

    @property
    def layout(self) -> PageLayout:
        """Return the page layout."""
        planes = tuple(Plane(name, self.dtype, self.unit) for name in self.planes)
        return PageLayout(
            PAGE_TOKENS, (LayerGroup("attention", tuple(range(self.layers)), planes),)
        )


SHAPES = (
    Shape("llama", 32, ("k", "v"), "bfloat16", (8, 128)),
    Shape("mla", 61, ("latent",), "bfloat16", (1, 576)),
    Shape("tp8", 32, ("k", "v"), "bfloat16", (1, 128)),
    Shape("idx132", 61, ("row",), "uint8", (132,)),
)


class Work:
    """Describe a pool with a quarter more slots than used, and pages of `nbytes` in all.

    `units` are random token slots; `runs` has each page's tokens next to each other. `pages` are
    buffers at random places of one shared mapping, `arena`.
    """

    def __init__(self, shape: Shape, device: str, nbytes: int) -> None:
        layout = shape.layout
        self.name, self.page_nbytes = shape.name, layout.page_nbytes
        self.count = max(1, nbytes // self.page_nbytes)
        slots = (self.count + -(-self.count // 4)) * PAGE_TOKENS
        self.memory = random_bytes(
            shape.layers * len(shape.planes) * slots * layout.groups[0].planes[0].unit_nbytes,
            device,
        )
        whole = self.memory.view(getattr(torch, shape.dtype)).view(-1, slots, *shape.unit)
        names = [
            ("attention", layer, plane) for layer in range(shape.layers) for plane in shape.planes
        ]
        self.pool = KVPool(layout, dict(zip(names, whole, strict=True)))
        self.units = torch.randperm(slots)[: self.count * PAGE_TOKENS]
        starts = torch.randperm(slots // PAGE_TOKENS)[: self.count] * PAGE_TOKENS
        self.runs = (starts[:, None] + torch.arange(PAGE_TOKENS)).flatten()
        self.slot_nbytes = -(-self.page_nbytes // SLOT_ALIGN_NBYTES) * SLOT_ALIGN_NBYTES
        self.mapping = mmap.mmap(-1, self.count * self.slot_nbytes)
        self.arena = torch.frombuffer(self.mapping, dtype=torch.uint8)
        rows = self.arena.view(self.count, self.slot_nbytes)
        self.pages = [rows[i, : self.page_nbytes] for i in torch.randperm(self.count).tolist()]

    @property
    def nbytes(self) -> int:
        """Return the payload of one move."""
        return self.count * self.page_nbytes

    def table(self, units: torch.Tensor) -> UnitTable:
        """Return a unit table."""
        return self.pool.unit_table(units, self.count)

    def check_gather(self, gather: Callable[[], None], units: torch.Tensor) -> None:
        """Check a gather with fresh bytes and a poisoned arena."""
        self.memory.copy_(random_bytes(len(self.memory), self.memory.device))
        self.arena.fill_(POISON)
        synchronize()
        gather()
        synchronize()
        found = self.arena.clone()
        self.arena.fill_(POISON)
        TorchTransfer().gather(self.pool, self.table(units), self.pages, None)
        assert torch.equal(found, self.arena), f"{self.name}: gathered bytes are wrong"

    def check_scatter(self, scatter: Callable[[], None], units: torch.Tensor) -> None:
        """Check a scatter with fresh bytes, a poisoned pool and guards between pages."""
        self.arena.copy_(random_bytes(len(self.arena), "cpu"))
        self.memory.fill_(POISON)
        synchronize()
        scatter()
        synchronize()
        found = self.memory.clone()
        self.memory.fill_(POISON)
        TorchTransfer().scatter(self.pool, self.table(units), self.pages, None)
        assert torch.equal(found, self.memory), f"{self.name}: scattered bytes are wrong"


def random_bytes(nbytes: int, device: str | torch.device) -> torch.Tensor:
    """Return random bytes."""
    words = torch.randint(
        -(1 << 63), (1 << 63) - 1, (-(-nbytes // 8),), dtype=torch.int64, device=device
    )
    return words.view(torch.uint8)[:nbytes]


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wait_locked(
    client: Client, namespace: Namespace, stored: list[bytes], transfer: Transfer
) -> None:
    """Wait until the node's arena is page-locked."""
    end = time.monotonic() + LOCK_S
    with client.open_get(namespace, stored[:1]) as slots:
        while not transfer.host_memory(slots.arena.memory):
            if time.monotonic() > end:
                raise SystemExit(f"the arena was not page-locked in {LOCK_S:g} s")
            time.sleep(0.05)
