"""Every transfer copies exactly the bytes found by a slow walk over the raw storage.

This holds for every layout of the engines, with random slots and pages anywhere in memory, and no
byte beside them changes. The staged pipeline runs on a simulated device everywhere, and on a GPU
where there is one.
"""

import copy
import functools
import itertools
import random
from collections.abc import Callable

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer, Transfer
from gpu_agent.kernels import plan
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer
from kvstore import InvalidRequest, LayerGroup, PageLayout, Plane

Tensors = dict[tuple[str, int, str], torch.Tensor]
Unit = tuple[torch.Tensor, torch.Tensor, int]
Case = tuple[PageLayout, Tensors, dict[tuple[str, str], str]]
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def filled(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return random bytes viewed as `dtype`, including NaNs with payloads."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


@case
def sglang_mha() -> Case:
    layout = PageLayout(
        4,
        (
            LayerGroup(
                "g", (0, 1), (Plane("k", "bfloat16", (2, 5)), Plane("v", "bfloat16", (2, 5)))
            ),
        ),
    )
    return (
        layout,
        {("g", i, p): filled(30, 2, 5, dtype=torch.bfloat16) for i in (0, 1) for p in "kv"},
        {},
    )


@case
def lightllm_one_tensor_for_k_and_v() -> Case:
    layout = PageLayout(
        4,
        (
            LayerGroup(
                "g", (0, 1, 2), (Plane("k", "float16", (2, 3)), Plane("v", "float16", (2, 3)))
            ),
        ),
    )
    whole = filled(3, 31, 4, 3, dtype=torch.float16)
    tensors = {}
    for layer in range(3):
        tensors["g", layer, "k"], tensors["g", layer, "v"] = (
            whole[layer, :, :2],
            whole[layer, :, 2:],
        )
    return layout, tensors, {}


@case
def lightllm_int8_with_scales() -> Case:
    planes = (Plane("kv", "int8", (4, 16)), Plane("scale", "bfloat16", (4, 2)))
    data, scales = filled(2, 21, 4, 16, dtype=torch.int8), filled(2, 21, 4, 2, dtype=torch.bfloat16)
    tensors = {("g", i, "kv"): data[i] for i in (0, 1)} | {
        ("g", i, "scale"): scales[i] for i in (0, 1)
    }
    return PageLayout(4, (LayerGroup("g", (0, 1), planes),)), tensors, {}


@case
def mla_576() -> Case:
    layout = PageLayout(4, (LayerGroup("g", (0, 1), (Plane("latent", "bfloat16", (1, 576)),)),))
    return (
        layout,
        {("g", i, "latent"): filled(14, 1, 576, dtype=torch.bfloat16) for i in (0, 1)},
        {},
    )


@case
def rows_of_578_bytes() -> Case:
    layout = PageLayout(3, (LayerGroup("g", (0, 1), (Plane("latent", "uint8", (1, 578)),)),))
    whole = filled(2, 12, 1, 578)
    return layout, {("g", i, "latent"): whole[i] for i in (0, 1)}, {}


@case
def rows_of_132_bytes() -> Case:
    layout = PageLayout(4, (LayerGroup("g", (0, 1), (Plane("row", "uint8", (132,)),)),))
    return layout, {("g", i, "row"): filled(20, 132) for i in (0, 1)}, {}


@case
def packed_mla_with_an_indexer_of_64_token_pages() -> Case:
    groups = (
        LayerGroup("kv", (0, 1), (Plane("latent", "uint8", (1, 656)),)),
        LayerGroup("indexer", (1,), (Plane("page", "uint8", (8448,), unit_tokens=64),)),
    )
    tensors: Tensors = {("kv", i, "latent"): filled(200, 1, 656) for i in (0, 1)}
    return PageLayout(64, groups), tensors | {("indexer", 1, "page"): filled(5, 8448)}, {}


@case
def two_groups_of_other_dtypes_and_slots() -> Case:
    groups = (
        LayerGroup(
            "full", (0, 2), (Plane("k", "bfloat16", (2, 4)), Plane("v", "bfloat16", (2, 4)))
        ),
        LayerGroup("window", (1,), (Plane("k", "float32", (3,)), Plane("v", "float8_e5m2", (7,)))),
    )
    tensors: Tensors = {
        ("full", i, p): filled(25, 2, 4, dtype=torch.bfloat16) for i in (0, 2) for p in "kv"
    }
    tensors["window", 1, "k"] = filled(15, 3, dtype=torch.float32)
    tensors["window", 1, "v"] = filled(15, 7, dtype=torch.float8_e5m2)
    return PageLayout(4, groups), tensors, {("window", "k"): "window", ("window", "v"): "window"}


@case
def planes_that_start_at_odd_bytes_of_a_page() -> Case:
    planes = (
        Plane("a", "uint8", (3,)),
        Plane("b", "float64", (2,)),
        Plane("c", "int32", (1,)),
        Plane("d", "int16", (5,)),
    )
    types = {"a": torch.uint8, "b": torch.float64, "c": torch.int32, "d": torch.int16}
    tensors = {
        ("g", i, p.name): filled(13, *p.unit_shape, dtype=types[p.name])
        for i in (4, 2)
        for p in planes
    }
    return PageLayout(3, (LayerGroup("g", (4, 2), planes),)), tensors, {}


@case
def blocks_padded_inside_a_wider_buffer() -> Case:
    """The block stride is larger than a block, and there is a storage offset, as in an overlay."""
    layout = PageLayout(
        8, (LayerGroup("g", (0,), (Plane("cell", "float16", (2, 4, 6), unit_tokens=4),)),)
    )
    buffer = filled(9 * 64 + 5, dtype=torch.float16)
    return layout, {("g", 0, "cell"): buffer.as_strided((9, 2, 4, 6), (64, 24, 6, 1), 5)}, {}


def block_pool(order: tuple[int, ...]) -> Case:
    """Return `[B, H, N, C]` over memory in any order of these dimensions, in one buffer."""
    shape = (7, 2, 4, 3)
    whole = filled(2, *(shape[i] for i in order), dtype=torch.bfloat16)
    back = [order.index(i) for i in range(4)]
    layout = PageLayout(
        8, (LayerGroup("g", (0, 1), (Plane("cell", "bfloat16", (2, 4, 3), unit_tokens=4),)),)
    )
    return layout, {("g", i, "cell"): whole[i].permute(back) for i in (0, 1)}, {}


for _order in itertools.permutations(range(4)):
    CASES["blocks_in_memory_order_" + "".join("BHNC"[i] for i in _order)] = lambda order=_order: (
        block_pool(order)
    )


# ---- the oracle: addresses from strides, one element at a time, one unit at a time ---------------


@functools.cache
def unit_bytes(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> torch.Tensor:
    """Return the offsets of a unit's bytes from its first element, in row-major order."""
    found: list[int] = []
    for index in itertools.product(*map(range, shape)):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=True))
        found.extend(range(offset * size, (offset + 1) * size))
    return torch.tensor(found)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage as one flat uint8 tensor, including guards and neighbors."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def walk(pool: KVPool, tensors: Tensors, units: dict[str, list[int]], page: int) -> list[Unit]:
    """Return (tensor, bytes in its storage, token) for every unit of a page, in page order."""
    found = []
    for group in pool.layout.groups:
        for layer in group.layers:
            for plane in group.planes:
                tensor = tensors[group.name, layer, plane.name]
                inside = unit_bytes(tensor.shape[1:], tensor.stride()[1:], tensor.element_size())
                space = next(
                    p.space
                    for p in pool.planes
                    if (p.piece.group, p.piece.plane) == (group.name, plane)
                )
                per_page = pool.layout.page_tokens // plane.unit_tokens
                for unit in range(page * per_page, (page + 1) * per_page):
                    first = tensor.storage_offset() + units[space][unit] * tensor.stride(0)
                    found.append(
                        (tensor, inside + first * tensor.element_size(), unit * plane.unit_tokens)
                    )
    return found


def random_units(pool: KVPool, pages: int) -> dict[str, list[int]]:
    """Return distinct slots in random order for `pages` pages."""
    draw = random.Random(7)
    count = {
        name: pages * pool.layout.page_tokens // space.unit_tokens
        for name, space in pool.spaces.items()
    }
    return {
        name: draw.sample(range(space.slots), count[name]) for name, space in pool.spaces.items()
    }


def tables(units: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(slots) for name, slots in units.items()}


class Pages:
    """Page buffers in descending order at odd places of one slab, with guard bytes around each."""

    GUARD, GAP = 0xA5, 77

    def __init__(self, count: int, nbytes: int) -> None:
        self.slab = torch.full(
            (count * (nbytes + self.GAP) + self.GAP,), self.GUARD, dtype=torch.uint8
        )
        starts = [self.GAP + i * (nbytes + self.GAP) for i in reversed(range(count))]
        self.rows = [self.slab[start : start + nbytes] for start in starts]

    def fill(self, values: torch.Tensor) -> "Pages":
        for row, value in zip(self.rows, values, strict=True):
            row.copy_(value)
        return self

    def check_guards(self) -> None:
        ends = [row.storage_offset() for row in self.rows] + [len(self.slab)]
        assert all(bool((self.slab[end - self.GAP : end] == self.GUARD).all()) for end in ends)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def made(name: str) -> Transfer:
    """Make a transfer with buffers of 4 KiB, so that most jobs take several chunks.

    Another name gives another order of the simulated steps.
    """
    if name.startswith("torch"):
        return TorchTransfer()
    if name == "staged on cuda":
        cuda = pytest.importorskip("gpu_agent.kernels.cuda", reason="needs cupy")
        return cuda.CudaTransfer(buffer_nbytes=4096)
    return StagedTransfer(SimulatedDevice(seed=len(name)), buffer_nbytes=4096)


@pytest.fixture(params=["torch", "staged", "staged again"])
def transfer(request: pytest.FixtureRequest) -> Transfer:
    """Return a transfer for pools in CPU memory."""
    return made(request.param)


ON_CUDA = [pytest.param(f"{name} on cuda", marks=needs_gpu) for name in ("torch", "staged")]


@pytest.fixture(params=["torch", "staged", "staged again", *ON_CUDA])
def mover(request: pytest.FixtureRequest) -> tuple[Transfer, str]:
    """Return a transfer and the device of the pools that it serves."""
    return made(request.param), "cuda" if "cuda" in request.param else "cpu"


def moved(tensors: Tensors, device: str) -> Tensors:
    """Return the same views of copies of the storages."""
    copies = {
        t.untyped_storage().data_ptr(): storage_bytes(t).clone().to(device)
        for t in tensors.values()
    }
    return {
        name: copies[t.untyped_storage().data_ptr()]
        .view(t.dtype)
        .as_strided(t.shape, t.stride(), t.storage_offset())
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_gather_reads_the_bytes_found_by_the_walk(name: str, mover: tuple[Transfer, str]) -> None:
    layout, tensors, spaces = CASES[name]()
    tensors = moved(tensors, mover[1])
    pool = KVPool(layout, tensors, spaces)
    units = random_units(pool, 3)
    pages = Pages(3, layout.page_nbytes)
    mover[0].gather(pool, pool.unit_table(tables(units), 3), pages.rows, mover[0].fence(pool))
    pages.check_guards()
    for page in range(3):
        expected = [
            storage_bytes(tensor).cpu()[places]
            for tensor, places, _ in walk(pool, tensors, units, page)
        ]
        assert torch.equal(pages.rows[page], torch.cat(expected))


@pytest.mark.parametrize("name", CASES)
def test_scatter_writes_only_its_slots(name: str, mover: tuple[Transfer, str]) -> None:
    layout, tensors, spaces = CASES[name]()
    tensors = moved(tensors, mover[1])
    pool = KVPool(layout, tensors, spaces)
    units = random_units(pool, 2)
    step = max(space.unit_tokens for space in pool.spaces.values())
    skip = min(step, layout.page_tokens)
    pages = Pages(2, layout.page_nbytes).fill(
        torch.randint(0, 256, (2, layout.page_nbytes), dtype=torch.uint8)
    )
    storage_of = {
        t.untyped_storage().data_ptr(): storage_bytes(t).clone().cpu() for t in tensors.values()
    }
    for page in range(2):
        walked = walk(pool, tensors, units, page)
        values = pages.rows[page].split([len(places) for _, places, _ in walked])
        for value, (tensor, places, token) in zip(values, walked, strict=True):
            if token >= skip:
                storage_of[tensor.untyped_storage().data_ptr()][places] = value
    mover[0].scatter(
        pool, pool.unit_table(tables(units), 2), pages.rows, mover[0].fence(pool), skip
    )
    for tensor in tensors.values():
        assert torch.equal(
            storage_bytes(tensor).cpu(), storage_of[tensor.untyped_storage().data_ptr()]
        )


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("skip_tokens", [0, 4, 8, 12, 16])
def test_skipped_tokens_keep_their_slots(
    mixed_pool: KVPool, skip_tokens: int, layerwise: bool, transfer: Transfer
) -> None:
    units = {"token": torch.randperm(40)[:16], "block": torch.randperm(10)[:4]}
    before = [plane.bits.clone() for plane in mixed_pool.planes]
    table = mixed_pool.unit_table(units, 2)
    read = Pages(2, mixed_pool.layout.page_nbytes)
    transfer.gather(mixed_pool, table, read.rows, None)
    inverse = [row ^ 0xFF for row in read.rows]
    transfer.scatter(
        mixed_pool, table, inverse, None, skip_tokens, (lambda *_: None) if layerwise else None
    )
    for plane, old in zip(mixed_pool.planes, before, strict=True):
        skip = skip_tokens // plane.piece.plane.unit_tokens
        written = units[plane.space][skip:]
        assert torch.equal(
            plane.bits[written].view(torch.uint8), old[written].view(torch.uint8) ^ 0xFF
        )
        changed = (plane.bits != old).any(dim=tuple(range(1, old.dim()))).nonzero().flatten()
        assert sorted(changed.tolist()) == sorted(written.tolist())


def test_round_trip_preserves_pages(mixed_pool: KVPool, transfer: Transfer) -> None:
    source = mixed_pool.unit_table(
        {"token": torch.randperm(40)[:24], "block": torch.randperm(10)[:6]}, 3
    )
    target = mixed_pool.unit_table(
        {"token": torch.randperm(40)[:24], "block": torch.randperm(10)[:6]}, 3
    )
    first, again = (Pages(3, mixed_pool.layout.page_nbytes) for _ in range(2))
    transfer.gather(mixed_pool, source, first.rows, None)
    transfer.scatter(mixed_pool, target, first.rows, None)
    transfer.gather(mixed_pool, target, again.rows, None)
    assert torch.equal(first.slab, again.slab)


def test_gather_reports_free_slots_and_landed_pages(token_pool: KVPool, transfer: Transfer) -> None:
    table = token_pool.unit_table(torch.randperm(96), 12)
    expected, pages = Pages(12, 1024), Pages(12, 1024)
    TorchTransfer().gather(token_pool, table, expected.rows, None)
    events: list[str] = []
    landed: list[int] = []

    def gathered() -> None:
        events.append("gathered")
        for plane in token_pool.planes:  # the engine reuses its slots at once
            plane.bits.fill_(0)

    def land(run: range) -> None:
        landed.extend(run)
        assert all(torch.equal(pages.rows[page], expected.rows[page]) for page in run)

    transfer.gather(token_pool, table, pages.rows, None, gathered, land)
    assert events == ["gathered"]
    assert landed == list(range(12))
    assert torch.equal(pages.slab, expected.slab)


def test_layers_are_placed_in_order_and_complete_at_their_event(
    mixed_pool: KVPool, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "FRAGMENT_NBYTES_MIN", 1)  # copy each layer separately
    table = mixed_pool.unit_table({"token": torch.randperm(40), "block": torch.randperm(10)}, 5)
    nbytes = mixed_pool.layout.page_nbytes
    pages = Pages(5, nbytes).fill(torch.randint(0, 256, (5, nbytes), dtype=torch.uint8))
    expected = copy.deepcopy(mixed_pool)
    TorchTransfer().scatter(expected, table, pages.rows, None)
    placed: list[int] = []

    def place(layer: int, event: object) -> None:
        placed.append(layer)
        if event is not None:
            event.synchronize()
        for plane, wanted in zip(mixed_pool.planes, expected.planes, strict=True):
            assert plane.piece.layer != layer or torch.equal(plane.bits, wanted.bits)

    transfer.scatter(mixed_pool, table, pages.rows, None, placed=place)
    assert placed == list(mixed_pool.layout.layers)


def test_empty_transfer_calls_its_hooks(token_pool: KVPool, transfer: Transfer) -> None:
    table = token_pool.unit_table(torch.arange(0), 0)
    events: list[object] = []
    transfer.gather(token_pool, table, [], None, lambda: events.append("gathered"), events.append)
    transfer.scatter(token_pool, table, [], None, placed=lambda layer, _: events.append(layer))
    assert events == ["gathered", 0, 1]


def test_hook_that_raises_ends_the_job_and_not_the_transfer(
    token_pool: KVPool, transfer: Transfer
) -> None:
    table = token_pool.unit_table(torch.randperm(96), 12)
    pages, again = Pages(12, 1024), Pages(12, 1024)

    def fail(*_: object) -> None:
        raise KeyError("mine")

    for _ in range(6):  # more jobs than may be in flight
        with pytest.raises(KeyError, match="mine"):
            transfer.gather(token_pool, table, pages.rows, None, landed=fail)
        with pytest.raises(KeyError, match="mine"):
            transfer.scatter(token_pool, table, pages.rows, None, placed=fail)
    transfer.gather(token_pool, table, pages.rows, None)
    TorchTransfer().gather(token_pool, table, again.rows, None)
    assert torch.equal(pages.slab, again.slab)


def test_inference_mode_tensors_can_be_written_outside_it() -> None:
    """Engines make their pools inside `torch.inference_mode`, which is a state of their thread."""
    layout = PageLayout(2, (LayerGroup("g", (0,), (Plane("k", "float32", (3,)),)),))
    with torch.inference_mode():
        pool = KVPool(layout, {("g", 0, "k"): torch.zeros(4, 3)})
    page = torch.ones(6).view(1, 6).view(torch.uint8)
    TorchTransfer().scatter(pool, pool.unit_table(torch.tensor([3, 1]), 1), page, None)
    assert pool.planes[0].bits.view(torch.float32).tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]


@pytest.mark.parametrize(
    ("pages", "wrong"),
    [
        ([torch.zeros(1024, dtype=torch.uint8)], "1 page buffers for 2 pages"),
        (
            [torch.zeros(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.int8)],
            "page buffer 1 .* torch.int8",
        ),
        (
            [torch.zeros(1023, dtype=torch.uint8)] * 2,
            r"page buffer 0 .*shape \[1024\], not torch.uint8 \[1023\]",
        ),
        (
            [torch.zeros(1024, 2, dtype=torch.uint8)[:, 0]] * 2,
            r"page buffer 0 .* with strides \[2\]",
        ),
        ([torch.zeros(1024, dtype=torch.uint8, device="meta")] * 2, "page buffer 0 .* on meta"),
    ],
)
def test_invalid_page_buffers_are_refused(
    token_pool: KVPool, pages: list[torch.Tensor], wrong: str, transfer: Transfer
) -> None:
    table = token_pool.unit_table(torch.arange(16), 2)
    for move in (transfer.gather, transfer.scatter):
        with pytest.raises(InvalidRequest, match=wrong):
            move(token_pool, table, pages, None)
