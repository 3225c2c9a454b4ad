"""Every engine's pool, read and written at the addresses that the engine uses.

A case allocates what the engine allocates, as flat bytes between guards, and makes a pool of it.
Its `runs` list the bytes of a page in plain Python, by the engine's formula rather than the pool's
views. Row sizes are the engines' real ones; layers and slots are few.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.layouts import lightllm, sglang, vllm

GUARD = 64  # bytes before and after each buffer that nothing may touch
PAGES = 3
Units = dict[str, list[int]]


class Run(NamedTuple):
    """A run of a page's bytes, in page order; `token` is the first token of its unit."""

    buffer: int
    offset: int
    nbytes: int
    token: int


class Case(NamedTuple):
    pool: KVPool
    buffers: list[torch.Tensor]
    runs: Callable[[Units], Iterator[Run]]
    overlaid: bool = False  # the spaces share memory: a number belongs to one of them at a time


class Memory:
    """Allocate memory as an engine does: random bytes with guards around."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        flat = torch.randint(0, 256, (nbytes + 2 * GUARD,), dtype=torch.uint8)
        self.buffers.append(flat)
        return flat[GUARD : GUARD + nbytes].view(dtype).view(shape)


CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


# ---- LightLLM: a buffer is [layers, slots + 1] rows -------------------------------------------


def lightllm_runs(layers: int, slots: int, *row_nbytes: int) -> Callable[[Units], Iterator[Run]]:
    def runs(units: Units) -> Iterator[Run]:
        for layer in range(layers):
            for buffer, nbytes in enumerate(row_nbytes):
                for token, slot in enumerate(units["token"]):
                    yield Run(buffer, (layer * (slots + 1) + slot) * nbytes, nbytes, token)

    return runs


@case
def lightllm_memory_manager() -> Case:
    memory = Memory()
    pool = lightllm.heads_pool(memory.tensor(3, 41, 2 * 2, 16, dtype=torch.bfloat16), 8)
    return Case(pool, memory.buffers, lightllm_runs(3, 40, 2 * 2 * 16 * 2))


@case
def lightllm_ppl_int8() -> Case:
    memory = Memory()
    data, scale = (
        memory.tensor(2, 41, 4, 128, dtype=torch.int8),
        memory.tensor(2, 41, 4, 16, dtype=torch.bfloat16),
    )
    return Case(
        lightllm.scaled_pool(data, scale, 8),
        memory.buffers,
        lightllm_runs(2, 40, 4 * 128, 4 * 16 * 2),
    )


@case
def lightllm_ppl_int4() -> Case:
    memory = Memory()
    data, scale = (
        memory.tensor(2, 41, 4, 64, dtype=torch.int8),
        memory.tensor(2, 41, 4, 16, dtype=torch.float16),
    )
    return Case(
        lightllm.scaled_pool(data, scale, 8),
        memory.buffers,
        lightllm_runs(2, 40, 4 * 64, 4 * 16 * 2),
    )


LATENT_ROWS = {
    "deepseek2": (576, torch.bfloat16),
    "deepseek2_fp8": (578, torch.uint8),
    "dsa_16bit": (648, torch.bfloat16),
    "dsa_fp8": (800, torch.uint8),
}
for _name, (_row, _dtype) in LATENT_ROWS.items():

    def _latent(row: int = _row, dtype: torch.dtype = _dtype) -> Case:
        memory = Memory()
        pool = lightllm.latent_pool(memory.tensor(2, 31, 1, row, dtype=dtype), 8)
        return Case(pool, memory.buffers, lightllm_runs(2, 30, row * dtype.itemsize))

    CASES[f"lightllm_{_name}"] = _latent


# ---- SGLang: a buffer per layer, K before V -------------------------------------------------


def slot_runs(
    space: str, unit_tokens: int, nbytes: int, buffers: Sequence[int], units: Units
) -> Iterator[Run]:
    for buffer in buffers:
        for unit, slot in enumerate(units[space]):
            yield Run(buffer, slot * nbytes, nbytes, unit * unit_tokens)


@case
def sglang_mha() -> Case:
    """K is longer than V."""
    memory = Memory()
    k = [memory.tensor(40, 2, 24, dtype=torch.bfloat16) for _ in range(3)]
    v = [memory.tensor(40, 2, 16, dtype=torch.bfloat16) for _ in range(3)]

    def runs(units: Units) -> Iterator[Run]:
        for layer in range(3):
            yield from slot_runs("token", 1, 2 * 24 * 2, [layer], units)
            yield from slot_runs("token", 1, 2 * 16 * 2, [3 + layer], units)

    return Case(sglang.mha_pool(k, v, 8), memory.buffers, runs)


@case
def sglang_window() -> Case:
    """Layers 0 and 2 have full attention, layer 1 a window with fewer slots and other heads."""
    memory = Memory()
    k, v = ([memory.tensor(64, 2, 8, dtype=torch.bfloat16) for _ in range(2)] for _ in "kv")
    window_k, window_v = [memory.tensor(28, 1, 12)], [memory.tensor(28, 1, 12)]
    full, window = sglang.Heads(k, v, (0, 2)), sglang.Heads(window_k, window_v, (1,))

    def runs(units: Units) -> Iterator[Run]:
        yield from slot_runs("token", 1, 2 * 8 * 2, [0, 2, 1, 3], units)
        yield from slot_runs("window", 1, 12, [4, 5], units)

    return Case(sglang.window_pool(full, window, 8), memory.buffers, runs)


for _row, _dtype in ((576, torch.bfloat16), (576, torch.uint8), (656, torch.uint8)):

    def _mla(row: int = _row, dtype: torch.dtype = _dtype) -> Case:
        memory = Memory()
        pool = sglang.mla_pool([memory.tensor(30, 1, row, dtype=dtype) for _ in range(2)], 8)
        return Case(
            pool, memory.buffers, lambda u: slot_runs("token", 1, row * dtype.itemsize, [0, 1], u)
        )

    CASES[f"sglang_mla_{_row * _dtype.itemsize}_bytes"] = _mla


@case
def sglang_dsa_with_an_indexer_in_some_layers() -> Case:
    memory = Memory()
    latents = [memory.tensor(448, 1, 656) for _ in range(3)]
    pages = [
        memory.tensor(7, 8448),
        torch.empty(0, 8448, dtype=torch.uint8),
        memory.tensor(7, 8448),
    ]

    def runs(units: Units) -> Iterator[Run]:
        yield from slot_runs("token", 1, 656, [0, 1, 2], units)
        yield from slot_runs("page", 64, 8448, [3, 4], units)

    return Case(sglang.dsa_pool(latents, pages, 128), memory.buffers, runs)


# ---- vLLM: one buffer; strides follow from the order of dimensions in memory --------------------

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class Dims(NamedTuple):
    """Sizes or strides of layers, blocks, heads, tokens and cells; strides count elements."""

    L: int
    B: int
    H: int
    N: int
    C: int


def strides(order: str, sizes: Dims) -> Dims:
    found, step = {}, 1
    for dimension in reversed(order):
        found[dimension], step = step, step * getattr(sizes, dimension)
    return Dims(**found)


def view(flat: torch.Tensor, step: Dims, sizes: Dims, layer: int) -> torch.Tensor:
    """Return `[B, H, N, C]` of one layer."""
    return flat.as_strided(sizes[1:], step[1:], flat.storage_offset() + layer * step.L)


def cell_runs(
    step: Dims, sizes: Dims, item: int, blocks: list[int], block_tokens: int, start: int = 0
) -> Iterator[Run]:
    """Yield the cells of all layers of one buffer, by block, kernel block, head and token."""
    ratio = block_tokens // sizes.N
    for layer in range(sizes.L):
        for unit, block in enumerate(blocks):
            for row in range(block * ratio, (block + 1) * ratio):
                for head in range(sizes.H):
                    for token in range(sizes.N):
                        element = layer * step.L + row * step.B + head * step.H + token * step.N
                        yield Run(0, start + element * item, sizes.C * item, unit * block_tokens)


def vllm_case(order: str, sizes: Dims, dtype: torch.dtype, block_tokens: int) -> Case:
    memory, step = Memory(), strides(order, sizes)
    flat = memory.tensor(math.prod(sizes), dtype=dtype)
    views = {layer: view(flat, step, sizes, layer) for layer in range(sizes.L)}
    pool = vllm.block_pool({"full": vllm.Blocks(views, block_tokens)}, 2 * block_tokens)
    return Case(
        pool,
        memory.buffers,
        lambda u: cell_runs(step, sizes, dtype.itemsize, u["block"], block_tokens),
    )


VLLM = {
    "gqa": (Dims(3, 9, 2, 4, 2 * 16), torch.bfloat16, 4),
    "gqa_fp8": (Dims(2, 9, 2, 4, 2 * 16), torch.float8_e4m3fn, 4),
    "int8_per_token_head": (Dims(2, 9, 2, 4, 264), torch.int8, 4),
    "int4_per_token_head": (Dims(2, 9, 2, 4, 136), torch.uint8, 4),
    "mla": (Dims(2, 9, 1, 4, 576), torch.bfloat16, 4),
    "mla_packed_fp8": (Dims(2, 9, 1, 4, 656), torch.uint8, 4),
    "kernel_blocks": (Dims(2, 4 * 9, 2, 4, 16), torch.bfloat16, 16),
}
for _name, (_sizes, _dtype, _block_tokens) in VLLM.items():
    for _order in ORDERS:
        CASES[f"vllm_{_name}_{_order}"] = lambda a=(_order, _sizes, _dtype, _block_tokens): (
            vllm_case(*a)
        )


def sparse_attention(order: str, latent_block: int, indexer_block: int, indexer_at: int) -> Case:
    """Return latents (bf16) and indexer rows (132 bytes) of three layers in one buffer and block
    table.

    `latent_block` and `indexer_block` are strides in bytes from block to block, `indexer_at` is the
    start of the indexer.
    """
    memory, latent, row = Memory(), Dims(3, 9, 1, 4, 576), Dims(3, 9, 1, 4, 132)
    flat = memory.tensor(3 * 9 * 4 * (1152 + 132))
    latent_step = strides(order, latent)._replace(B=latent_block // 2)
    row_step = strides(order, row)._replace(B=indexer_block)
    latents = {
        layer: view(flat.view(torch.bfloat16), latent_step, latent, layer) for layer in range(3)
    }
    rows = {layer: view(flat[indexer_at:], row_step, row, layer) for layer in range(3)}

    def runs(units: Units) -> Iterator[Run]:
        yield from cell_runs(row_step, row, 1, units["block"], 4, start=indexer_at)
        yield from cell_runs(latent_step, latent, 2, units["block"], 4)

    groups = {"kv": vllm.Blocks(latents, 4), "indexer": vllm.Blocks(rows, 4)}
    return Case(vllm.block_pool(groups, 8), memory.buffers, runs)


CASES["vllm_dsa_LBHNC"] = lambda: sparse_attention("LBHNC", 4 * 1152, 4 * 132, 3 * 9 * 4 * 1152)
CASES["vllm_dsa_BLHNC"] = lambda: sparse_attention(
    "BLHNC", 3 * 4 * 1284, 3 * 4 * 1284, 3 * 4 * 1152
)


@case
def vllm_window_over_the_same_bytes() -> Case:
    """Layers 0, 1 and 2, 3 share addresses, but each group has its own block table."""
    memory, sizes = Memory(), Dims(2, 20, 2, 4, 16)
    step = strides("LBNHC", sizes)
    flat = memory.tensor(math.prod(sizes), dtype=torch.bfloat16)
    views = [view(flat, step, sizes, layer) for layer in range(2)]
    groups = {
        "full": vllm.Blocks(dict(zip((0, 2), views, strict=True)), 4, "full"),
        "window": vllm.Blocks(dict(zip((1, 3), views, strict=True)), 4, "window"),
    }

    def runs(units: Units) -> Iterator[Run]:
        for space in ("full", "window"):
            yield from cell_runs(step, sizes, 2, units[space], 4)

    return Case(vllm.block_pool(groups, 8), memory.buffers, runs, overlaid=True)


@case
def vllm_groups_of_other_shapes_and_dtypes() -> Case:
    """Groups with small and large blocks, other heads and dtypes are contiguous in one buffer."""
    memory = Memory()
    flat = memory.tensor(6000)
    a, b = Dims(2, 8, 2, 4, 12), Dims(1, 5, 3, 8, 20)
    step_a, step_b = strides("BLHNC", a), strides("LBNHC", b)
    views_a = {5 + layer: view(flat.view(torch.bfloat16), step_a, a, layer) for layer in range(2)}
    views_b = {2: view(flat[3072:].view(torch.int8), step_b, b, 0)}
    groups = {"b": vllm.Blocks(views_b, 8, "large"), "a": vllm.Blocks(views_a, 4)}

    def runs(units: Units) -> Iterator[Run]:
        yield from cell_runs(step_a, a, 2, units["block"], 4)
        yield from cell_runs(step_b, b, 1, units["large"], 8, start=3072)

    return Case(vllm.block_pool(groups, 8), memory.buffers, runs)


# ---- tests ----------------------------------------------------------------------------------


def random_units(case: Case, seed: int) -> Units:
    """Return distinct numbers in random order for all pages."""
    draw, taken, units = random.Random(seed), set[int](), {}
    for name, space in case.pool.spaces.items():
        free = sorted(set(range(space.slots)) - taken)
        units[name] = draw.sample(free, PAGES * case.pool.layout.page_tokens // space.unit_tokens)
        taken |= set(units[name]) if case.overlaid else set()
    return units


def page_runs(case: Case, units: Units, page: int) -> Iterator[Run]:
    """Yield the runs of one page; tokens count over all pages."""
    count = {name: len(numbers) // PAGES for name, numbers in units.items()}
    own = {
        name: numbers[page * count[name] : (page + 1) * count[name]]
        for name, numbers in units.items()
    }
    for run in case.runs(own):
        yield run._replace(
            offset=GUARD + run.offset, token=run.token + page * case.pool.layout.page_tokens
        )


def tables(units: Units) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(numbers) for name, numbers in units.items()}


def gathered(case: Case, units: Units) -> torch.Tensor:
    pages = torch.full((PAGES, case.pool.layout.page_nbytes), 0xA5, dtype=torch.uint8)
    TorchTransfer().gather(case.pool, case.pool.unit_table(tables(units), PAGES), list(pages), None)
    return pages


@pytest.mark.parametrize("name", CASES)
def test_page_has_the_bytes_at_the_engines_addresses(name: str) -> None:
    case = CASES[name]()
    units = random_units(case, 1)
    pages = gathered(case, units)
    memory = [bytes(buffer.tolist()) for buffer in case.buffers]
    for page in range(PAGES):
        runs = page_runs(case, units, page)
        expected = b"".join(
            memory[run.buffer][run.offset : run.offset + run.nbytes] for run in runs
        )
        assert bytes(pages[page].tolist()) == expected


@pytest.mark.parametrize("skipped_units", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_scatter_writes_only_the_slots_of_its_pages(name: str, skipped_units: int) -> None:
    source, target = CASES[name](), CASES[name]()  # different random bytes
    pages = gathered(source, random_units(source, 1))
    units = random_units(target, 2)
    skip = skipped_units * max(space.unit_tokens for space in target.pool.spaces.values())
    expected = [bytearray(buffer.tolist()) for buffer in target.buffers]
    for page in range(PAGES):
        start = 0
        for run in page_runs(target, units, page):
            if run.token >= skip:
                data = bytes(pages[page, start : start + run.nbytes].tolist())
                expected[run.buffer][run.offset : run.offset + run.nbytes] = data
            start += run.nbytes
    table = target.pool.unit_table(tables(units), PAGES)
    TorchTransfer().scatter(target.pool, table, list(pages), None, skip)
    for buffer, want in zip(target.buffers, expected, strict=True):
        assert bytes(buffer.tolist()) == want


def test_orders_have_the_strides_of_the_engine() -> None:
    """The strides are vLLM's: 4 layers, 10 blocks of 16 tokens, 8 heads of 128, bf16."""
    sizes = Dims(4, 10, 8, 16, 256)
    assert strides("LBNHC", sizes) == (327680, 32768, 256, 2048, 1)
    assert strides("LBHNC", sizes) == (327680, 32768, 4096, 256, 1)
    assert strides("BLHNC", sizes) == (32768, 131072, 4096, 256, 1)


@pytest.mark.parametrize("name", VLLM)
def test_pools_of_all_stride_orders_share_their_pages(name: str) -> None:
    """Pages saved in one order load in every other one, each cell to its place."""
    sizes, dtype, block_tokens = VLLM[name]
    source = vllm_case("LBNHC", sizes, dtype, block_tokens)
    units = random_units(source, 1)
    pages = gathered(source, units)
    for order in ORDERS:
        target = vllm_case(order, sizes, dtype, block_tokens)
        assert target.pool.layout.fingerprint == source.pool.layout.fingerprint
        table = target.pool.unit_table(tables(units), PAGES)
        TorchTransfer().scatter(target.pool, table, list(pages), None)
        for ours, theirs in zip(target.pool.planes, source.pool.planes, strict=True):
            assert torch.equal(ours.bits[units["block"]], theirs.bits[units["block"]])


def test_contiguous_block_of_all_layers_is_the_page() -> None:
    memory, sizes = Memory(), Dims(3, 7, 2, 4, 16)
    flat = memory.tensor(math.prod(sizes))
    views = {layer: view(flat, strides("BLHNC", sizes), sizes, layer) for layer in range(3)}
    pool = vllm.block_pool({"full": vllm.Blocks(views, 4)}, 4)
    pages = torch.empty(2, pool.layout.page_nbytes, dtype=torch.uint8)
    TorchTransfer().gather(pool, pool.unit_table(torch.tensor([5, 2]), 2), list(pages), None)
    assert torch.equal(pages, flat.view(7, -1)[[5, 2]])
