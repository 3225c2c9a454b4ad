"""The kernels' tables and source, compared with `TorchTransfer` without a GPU.

test_kernels_pipeline.py tests the order of the work, test_kernels_cuda.py needs a GPU.
"""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.kernels import plan as plans
from gpu_agent.kernels.device import Launch
from gpu_agent.kernels.plan import Plan, divisor, merged
from gpu_agent.kernels.simulated import SimulatedDevice, quotient, run_kernel
from gpu_agent.kernels.staged import StagedTransfer
from kvstore import InvalidRequest, LayerGroup, PageLayout, Plane

SOURCE = Path(plans.__file__).with_name("transfer.cu")
DTYPES = ("uint8", "bfloat16", "float32", "int64", "float8_e4m3fn")
Kernel = Callable[[str, Launch], None]


def random_pool(seed: int) -> KVPool:
    """Return a pool of a random layout over views in any order of dimensions, with gaps."""
    draw = random.Random(seed)
    groups, tensors, spaces = [], {}, {}
    for name in "abc"[: draw.randint(1, 3)]:
        planes = []
        for plane in "xyz"[: draw.randint(1, 3)]:
            shape = draw.choice(
                [
                    (1,),
                    (7,),
                    (132,),
                    (256,),
                    (3, 5),
                    (1, 66),
                    (2, 3, 4),
                    (4, 1, 8),
                    (5, 2, 3),
                    (2, 16),
                ]
            )
            planes.append(Plane(plane, draw.choice(DTYPES), shape, draw.choice((1, 4))))
            spaces[name, plane] = (
                draw.choice(("", f"{name}{plane}")) + f"of {planes[-1].unit_tokens}"
            )
        groups.append(
            LayerGroup(name, tuple(draw.sample(range(6), draw.randint(1, 3))), tuple(planes))
        )
        for layer in groups[-1].layers:
            for plane in planes:
                tensors[name, layer, plane.name] = random_view(
                    draw, (40, *plane.unit_shape), plane.dtype
                )
    return KVPool(PageLayout(8, tuple(groups)), tensors, spaces)


def random_view(draw: random.Random, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    order = list(range(len(shape)))
    if draw.random() < 0.5:
        draw.shuffle(order)
    wider = [size + draw.choice((0, 0, 1, 3, 8)) for size in shape]
    nbytes = torch.Size(wider).numel() * getattr(torch, dtype).itemsize
    whole = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(getattr(torch, dtype))
    view = whole.view([wider[i] for i in order]).permute(
        [order.index(i) for i in range(len(shape))]
    )
    for dim, (size, room) in enumerate(zip(shape, wider, strict=True)):
        view = view.narrow(dim, draw.randint(0, room - size), size)
    return view


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the whole storage, including guards and neighbors."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def random_units(pool: KVPool, pages: int) -> dict[str, torch.Tensor]:
    per_page = {
        name: pool.layout.page_tokens // space.unit_tokens for name, space in pool.spaces.items()
    }
    return {
        name: torch.randperm(space.slots)[: pages * per_page[name]]
        for name, space in pool.spaces.items()
    }


def slab(count: int, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return poisoned memory and pages in it, separated by bytes that must not be touched."""
    whole = torch.full((count, nbytes + 61), 0x5A, dtype=torch.uint8)
    return whole, [row[30 : 30 + nbytes] for row in whole]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """Compile the kernels' source for the CPU, and run one thread after the other."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++ to run transfer.cu on the CPU")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "cpu.cpp").write_text(
        """
#include <algorithm>
#define __device__
#define __global__
#define __launch_bounds__(threads)
struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)(((unsigned long long)a * b) >> 32);
}
using std::min;
#include "transfer.cu"
extern "C" void run(int is_gather, const long long* a) {
  blockDim.x = 64, gridDim.x = 3;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
      (is_gather ? gather : scatter)((const Plane*)a[0], (const Tile*)a[1], (const i64*)a[2],
                                     (const i64*)a[3],
                                     a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
}
"""
    )
    library = folder / "cpu.so"
    options = [
        "-std=c++17",
        "-O1",
        "-Wno-unknown-pragmas",
        "-shared",
        "-fPIC",
        f"-I{SOURCE.parent}",
    ]
    subprocess.run([compiler, *options, str(folder / "cpu.cpp"), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).run

    def kernel(name: str, launch: Launch) -> None:
        run(int(name == "gather"), ctypes.byref(launch))

    return kernel


@pytest.fixture(params=["simulated", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return run_kernel if request.param == "simulated" else request.getfixturevalue("compiled")


# ---- tables ------------------------------------------------------------------------------


def test_quotients_are_exact_in_32_bits() -> None:
    draw = random.Random(1)
    values = [1, 2, 3, 5, 7, 33, 72, 289, 641, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31]
    for value in values + [draw.randrange(1, 1 << draw.randint(1, 31)) for _ in range(500)]:
        by = divisor(value)
        assert 0 <= by.magic < 1 << 32
        numbers = [
            0,
            1,
            value - 1,
            value,
            2 * value - 1,
            (1 << 31) - 1,
            *(draw.randrange(1 << 31) for _ in range(50)),
        ]
        for n in (n for n in numbers if n < 1 << 31):
            assert quotient(n, by) == n // value, (n, value)


@pytest.mark.parametrize(
    ("shape", "strides", "unit"),
    [
        ((8, 128), (128, 1), (2048, ())),
        ((1, 576), (9999, 1), (1152, ())),  # a dimension of size one has no stride
        ((4, 128), (256, 1), (256, ((4, 512),))),  # K heads beside V heads
        ((2, 4, 6), (64, 6, 1), (48, ((2, 128),))),
        ((2, 4, 6), (48, 12, 1), (12, ((8, 24),))),  # two dimensions merge into one
        # [H, N, C] of [N, H, C] memory.
        (
            (8, 16, 128),
            (128, 1024, 1),
            (256, ((16, 2048), (8, 256))),
        ),
        ((4, 3), (1, 4), (2, ((3, 8), (4, 2)))),  # transposed: rows of one element
    ],
)
def test_units_have_the_longest_rows_and_fewest_dimensions(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: tuple[int, tuple[tuple[int, int], ...]]
) -> None:
    assert merged(shape, strides, 2) == unit


def words(*planes: Plane, page_align: int = 16, shift: int = 0) -> list[int]:
    layout = PageLayout(4, (LayerGroup("g", (0,), planes),))
    tensors = {}
    for plane in planes:
        nbytes = 10 * plane.unit_nbytes
        flat = torch.zeros(nbytes + shift, dtype=torch.uint8)[shift:].view(
            getattr(torch, plane.dtype)
        )
        tensors["g", 0, plane.name] = flat.view(10, *plane.unit_shape)
    return Plan(KVPool(layout, tensors), page_align).planes[:, 3].tolist()


def test_words_are_as_wide_as_addresses_allow() -> None:
    for nbytes, word in [
        (2048, 16),
        (576, 16),
        (656, 16),
        (8448, 16),
        (264, 8),
        (132, 4),
        (578, 2),
        (3, 1),
    ]:
        assert words(Plane("x", "uint8", (nbytes,))) == [word]
    assert words(Plane("x", "uint8", (64,)), shift=8) == [8]  # the pool's base
    assert words(Plane("x", "uint8", (64,)), page_align=4) == [4]  # the pages' addresses
    after_odd = words(
        Plane("a", "uint8", (1,)), Plane("b", "uint8", (64,)), Plane("c", "uint8", (7,))
    )
    assert after_odd == [1, 4, 1]  # b begins at byte 4 of a page


@pytest.mark.parametrize("seed", range(12))
def test_tiles_spans_and_chunks_cover_the_page_once(seed: int) -> None:
    pool = random_pool(seed)
    plan, layout = Plan(pool), pool.layout
    end = 0
    for plane, row, column, count in plan.tiles.tolist():
        offset, word, row_words = (int(plan.planes[plane, field]) for field in (2, 3, 7))
        assert offset + (row * row_words + column) * word == end
        end += count * word
    assert end == layout.page_nbytes
    together = torch.zeros(layout.page_nbytes, dtype=torch.uint8)
    for span in (span for _, spans in plan.layers for span in spans):
        together[span.offset : span.offset + span.nbytes] += 1
    assert (together == 1).all()
    for buffer_nbytes in (4096, 1 << 20):
        for cut in (plan.gather_chunks, plan.scatter_chunks, plan.layer_chunks):
            moved = torch.zeros(5, layout.page_nbytes, dtype=torch.uint8)
            for chunk in cut(5, buffer_nbytes):
                assert chunk.page_count * chunk.span.row_nbytes <= buffer_nbytes
                pages = moved[chunk.page_first : chunk.page_first + chunk.page_count]
                pages[:, chunk.span.offset : chunk.span.offset + chunk.span.nbytes] += 1
            assert (moved == 1).all()


def plan_of(page_tokens: int, layers: int, plane: Plane) -> Plan:
    layout = PageLayout(page_tokens, (LayerGroup("g", tuple(range(layers)), (plane,)),))
    tensors = {
        ("g", i, plane.name): torch.empty(page_tokens, *plane.unit_shape, dtype=torch.uint8)
        for i in range(layers)
    }
    return Plan(KVPool(layout, tensors))


def test_first_or_last_chunk_is_small() -> None:
    """The first chunk of a gather and the last of a scatter are small, so the link waits little.

    A job that fits a buffer is one chunk.
    """
    small, large = (
        plan_of(1, 1, Plane("x", "uint8", (1024,))),
        plan_of(1, 1, Plane("x", "uint8", (6144,))),
    )
    assert [c.page_count for c in small.gather_chunks(20, 8192)] == [2, 6, 6, 6]
    assert [c.page_count for c in small.gather_chunks(32, 16384)] == [4, 14, 14]
    assert [c.page_count for c in small.scatter_chunks(20, 8192)] == [6, 6, 6, 2]
    assert [c.page_count for c in small.gather_chunks(8, 8192)] == [8]
    assert [c.page_count for c in small.scatter_chunks(8, 8192)] == [8]
    sizes = [(c.page_first, c.span.nbytes) for c in large.gather_chunks(3, 8192)]
    assert sizes == [(0, 2048), (0, 4096), (1, 6144), (2, 6144)]
    sizes = [(c.page_first, c.span.nbytes) for c in large.scatter_chunks(3, 8192)]
    assert sizes == [(0, 6144), (1, 6144), (2, 4096), (2, 2048)]
    one_tile = plan_of(1, 1, Plane("x", "uint8", (1600,)))
    assert [c.span.nbytes for c in one_tile.gather_chunks(4, 4096)] == [1600, 1600, 1600]
    # A quarter of the buffer is more than a page, but less than a row of the buffer.
    for cut in (
        one_tile.gather_chunks,
        one_tile.scatter_chunks,
    ):
        assert [c.span.nbytes for c in cut(5, 4 * 1601)] == [1600, 1600, 1600]


def test_small_layers_are_copied_together() -> None:
    tp8 = plan_of(64, 10, Plane("kv", "uint8", (512,)))  # 32 KiB per layer
    assert [layers for layers, _ in tp8.layers] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [[span.nbytes for span in spans] for _, spans in tp8.layers] == [
        [128 << 10],
        [128 << 10],
        [64 << 10],
    ]
    assert [c.layers for c in tp8.layer_chunks(2, 128 << 10)] == [
        (),
        (0, 1, 2, 3),
        (),
        (4, 5, 6, 7),
        (8, 9),
    ]
    llama = plan_of(64, 3, Plane("kv", "uint8", (4096,)))
    assert [layers for layers, _ in llama.layers] == [(0,), (1,), (2,)]


def test_units_beyond_32_bits_are_refused_by_name() -> None:
    layout = PageLayout(1, (LayerGroup("g", (3,), (Plane("huge", "uint8", ((1 << 30) + 1,)),)),))
    pool = KVPool(layout, {("g", 3, "huge"): torch.empty(1, (1 << 30) + 1, dtype=torch.uint8)})
    with pytest.raises(
        InvalidRequest, match="group g layer 3 plane huge: 1 rows of 1073741825 words of 1 bytes"
    ):
        Plan(pool)


# ---- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_any_layout_is_copied_like_the_reference(
    seed: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plans, "FRAGMENT_NBYTES_MIN", (1, 2000, plans.FRAGMENT_NBYTES_MIN)[seed % 3]
    )
    pool, other = random_pool(seed), random_pool(seed)
    transfer = StagedTransfer(SimulatedDevice(seed, kernel), buffer_nbytes=4096)
    table, skip = pool.unit_table(random_units(pool, 5), 5), random.Random(seed).choice((0, 4, 12))
    nbytes = pool.layout.page_nbytes
    (whole, pages), (expected, wanted) = slab(5, nbytes), slab(5, nbytes)
    transfer.gather(pool, table, pages, None)
    TorchTransfer().gather(pool, table, wanted, None)
    assert torch.equal(whole, expected)
    fresh = list(torch.randint(0, 256, (5, nbytes), dtype=torch.uint8))
    storages = [[storage_bytes(p.bits) for p in each.planes] for each in (pool, other)]
    # Both pools begin with the same bytes, also between the units.
    for mine, theirs in zip(*storages, strict=True):
        theirs.copy_(mine)
    transfer.scatter(pool, table, fresh, None, skip, placed=(lambda *_: None) if seed % 2 else None)
    TorchTransfer().scatter(other, table, fresh, None, skip)
    for mine, theirs in zip(*storages, strict=True):
        assert torch.equal(mine, theirs)


def test_direct_kernel_writes_pages_at_any_address(token_pool: KVPool, kernel: Kernel) -> None:
    """The direct kernel uses no staging: it finds the pages through a table of addresses."""
    plan, units = Plan(token_pool, page_align=1), torch.randperm(96)
    (whole, pages), (expected, wanted) = slab(12, 1024), slab(12, 1024)
    addresses = torch.tensor([page.data_ptr() for page in pages])
    launch = Launch(
        *(table.data_ptr() for table in (plan.planes, plan.tiles, units, addresses)),
        0,
        0,
        len(plan.tiles),
        0,
        12,
        12,
        0,
    )
    kernel("gather", launch)
    TorchTransfer().gather(token_pool, token_pool.unit_table(units, 12), wanted, None)
    assert torch.equal(whole, expected)


def test_offsets_beyond_2_gib(kernel: Kernel) -> None:
    layout = PageLayout(4, (LayerGroup("g", (0,), (Plane("x", "uint8", (1152,)),)),))
    slots = (5 << 30) // 1152
    # Only a few places of it are touched.
    pool = KVPool(layout, {("g", 0, "x"): torch.empty((slots, 1152), dtype=torch.uint8)})
    far = torch.tensor([slots - 1, 1_900_000, 3_800_000, 7])
    fresh = [torch.randint(0, 256, (4 * 1152,), dtype=torch.uint8)]
    StagedTransfer(SimulatedDevice(0, kernel)).scatter(pool, pool.unit_table(far, 1), fresh, None)
    assert torch.equal(pool.planes[0].bits[far].view(-1), fresh[0])
    back = [torch.zeros(4 * 1152, dtype=torch.uint8)]
    StagedTransfer(SimulatedDevice(0, kernel)).gather(pool, pool.unit_table(far, 1), back, None)
    assert torch.equal(back[0], fresh[0])


# ---- compilation -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [pytest.param("80", marks=pytest.mark.long), "90"])
def test_source_compiles_for_a_gpu(arch: str, tmp_path: Path) -> None:
    """Compile with nvcc, or with the runtime compiler that CuPy uses."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        subprocess.run(
            [nvcc, f"-arch=sm_{arch}", "-cubin", "-o", str(tmp_path / "k"), str(SOURCE)], check=True
        )
        return
    nvrtc = pytest.importorskip(
        "cupy_backends.cuda.libs.nvrtc", reason="needs nvcc, or cupy with NVRTC"
    )
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    nvrtc.compileProgram(
        program, ("--std=c++17", f"-arch=sm_{arch}", "--device-as-default-execution-space")
    )
    assert b"gather" in nvrtc.getCUBIN(program)
