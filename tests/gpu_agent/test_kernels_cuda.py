"""`CudaTransfer` on a GPU, compared with `TorchTransfer` byte by byte.

The layouts themselves are tested in test_transfer.py. Every test draws fresh bytes and poisons what
it writes to.
"""

import mmap
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from kvstore import ConfigError, InvalidRequest, LayerGroup, PageLayout, Plane

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
cuda = pytest.importorskip("gpu_agent.kernels.cuda", reason="needs cupy")

PAGES, SLOTS = 24, 4000
ROWS = {"llama": ("bfloat16", (8, 128)), "row132": ("uint8", (132,)), "row578": ("uint8", (578,))}


@pytest.fixture(params=[64 << 10, 16 << 20], ids=["pages larger than a buffer", "default buffers"])
def transfer(request: pytest.FixtureRequest) -> "cuda.CudaTransfer":
    return cuda.CudaTransfer(buffer_nbytes=request.param)


@pytest.fixture(params=ROWS)
def pool(request: pytest.FixtureRequest) -> KVPool:
    """Make three layers of K and V in one tensor each, V after K; slots in between are guards."""
    dtype, shape = ROWS[request.param]
    layout = PageLayout(
        64, (LayerGroup("g", (0, 1, 2), (Plane("k", dtype, shape), Plane("v", dtype, shape))),)
    )
    nbytes = layout.groups[0].planes[0].unit_nbytes
    whole = torch.randint(0, 256, (3, SLOTS, 2, nbytes), dtype=torch.uint8, device="cuda").view(
        getattr(torch, dtype)
    )
    parts = {"k": whole[:, :, 0], "v": whole[:, :, 1]}
    return KVPool(
        layout, {("g", i, p): parts[p][i].view(SLOTS, *shape) for i in range(3) for p in "kv"}
    )


@pytest.fixture(params=["pageable", "pinned", "registered"])
def buffers(
    request: pytest.FixtureRequest, pool: KVPool, transfer: "cuda.CudaTransfer"
) -> Iterator[torch.Tensor]:
    """Return poisoned memory `[PAGES, page + guard]` for the pages of `pages_of`."""
    shape = (PAGES, pool.layout.page_nbytes + 64)
    if request.param == "registered":
        memory = mmap.mmap(-1, shape[0] * shape[1])
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
        transfer.register_host(whole.data_ptr(), whole.nbytes)
    else:
        whole = torch.empty(shape, dtype=torch.uint8, pin_memory=request.param == "pinned")
    yield whole.fill_(0x5A)
    if request.param == "registered":
        transfer.unregister_host(whole.data_ptr())


def pages_of(buffers: torch.Tensor, pool: KVPool) -> list[torch.Tensor]:
    """Return the pages in another order than that of their addresses."""
    return [buffers[number, : pool.layout.page_nbytes] for number in reversed(range(len(buffers)))]


def reference(pool: KVPool, units: torch.Tensor, count: int) -> torch.Tensor:
    pages = torch.full((count, pool.layout.page_nbytes), 0xC3, dtype=torch.uint8)
    TorchTransfer().gather(pool, pool.unit_table(units, count), list(pages), None)
    return pages


def all_bytes(pool: KVPool) -> torch.Tensor:
    storage = pool.planes[0].bits.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).clone()


def test_gather_fills_only_its_pages(
    transfer: "cuda.CudaTransfer", pool: KVPool, buffers: torch.Tensor
) -> None:
    units = torch.randperm(SLOTS)[: PAGES * 64]
    events: list[object] = []
    pages = pages_of(buffers, pool)
    transfer.gather(
        pool,
        pool.unit_table(units, PAGES),
        pages,
        transfer.fence(pool),
        lambda: events.append("gathered"),
        events.extend,
    )
    assert torch.equal(torch.stack(pages), reference(pool, units, PAGES))
    assert bool((buffers[:, pool.layout.page_nbytes :] == 0x5A).all())
    assert sorted(events, key=str) == sorted(["gathered", *range(PAGES)], key=str)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("skip_tokens", [0, 37])
def test_scatter_fills_only_its_slots(
    transfer: "cuda.CudaTransfer",
    pool: KVPool,
    buffers: torch.Tensor,
    layerwise: bool,
    skip_tokens: int,
) -> None:
    units = torch.randperm(SLOTS)[: PAGES * 64]
    table, pages = pool.unit_table(units, PAGES), pages_of(buffers, pool)
    for page in pages:
        page.copy_(torch.randint(0, 256, page.shape, dtype=torch.uint8))
    before = all_bytes(pool)
    TorchTransfer().scatter(pool, table, pages, None, skip_tokens)
    wanted = all_bytes(pool)
    torch.empty(0, dtype=torch.uint8, device="cuda").set_(
        pool.planes[0].bits.untyped_storage()
    ).copy_(before)
    seen: dict[int, torch.Tensor] = {}
    engine = torch.cuda.Stream()

    def place(layer: int, event: torch.cuda.Event) -> None:
        engine.wait_event(event)
        with torch.cuda.stream(engine):  # a layer computes while later ones are copied
            seen[layer] = torch.stack(
                [p.bits[units[skip_tokens:].cuda()] for p in pool.planes if p.piece.layer == layer]
            )

    transfer.scatter(
        pool, table, pages, transfer.fence(pool), skip_tokens, place if layerwise else None
    )
    assert torch.equal(all_bytes(pool), wanted)
    engine.synchronize()
    assert list(seen) == ([0, 1, 2] if layerwise else [])
    for layer, values in seen.items():
        planes = [p.bits[units[skip_tokens:].cuda()] for p in pool.planes if p.piece.layer == layer]
        assert torch.equal(values, torch.stack(planes))


def test_gather_starts_after_the_engines_work(pool: KVPool) -> None:
    transfer = cuda.CudaTransfer()
    units = torch.arange(64)
    pages = torch.zeros((1, pool.layout.page_nbytes), dtype=torch.uint8)
    torch.cuda._sleep(200_000_000)  # a tenth of a second on the engine's stream
    for plane in pool.planes:
        plane.bits.fill_(0x11)
    transfer.gather(pool, pool.unit_table(units, 1), list(pages), transfer.fence(pool))
    assert torch.equal(pages, reference(pool, units, 1))


def test_wait_for_the_engine_uses_no_cpu() -> None:
    """An agents' process mostly waits; polling slowed the engine by a third (vLLM, H200)."""
    device = cuda.CudaTransfer().device
    for _ in range(3):
        torch.cuda._sleep(400_000_000)
        mark = torch.cuda.Event()  # without flags for how to wait
        mark.record()
        began, used = time.monotonic(), time.thread_time()
        device.wait(mark)
        took, used = time.monotonic() - began, time.thread_time() - used
        assert mark.query()
        assert took > 0.1
        assert used < took / 5
    device.wait(mark)
    device.wait(None)


def test_offsets_beyond_4_gib() -> None:
    transfer, nbytes = cuda.CudaTransfer(), 1152
    slots = (5 << 30) // nbytes
    layout = PageLayout(4, (LayerGroup("g", (0,), (Plane("x", "uint8", (nbytes,)),)),))
    pool = KVPool(
        layout, {("g", 0, "x"): torch.zeros((slots, nbytes), dtype=torch.uint8, device="cuda")}
    )
    far = torch.tensor([slots - 1, 1_900_000, 3_800_000, 7])
    fresh, back = (
        torch.randint(0, 256, (1, 4 * nbytes), dtype=torch.uint8),
        torch.zeros((1, 4 * nbytes), dtype=torch.uint8),
    )
    transfer.scatter(pool, pool.unit_table(far, 1), list(fresh), None)
    assert torch.equal(pool.planes[0].bits[far.cuda()].cpu().view(1, -1), fresh)
    assert int(pool.planes[0].bits.any(dim=1).sum()) == 4
    transfer.gather(pool, pool.unit_table(far, 1), list(back), None)
    assert torch.equal(back, fresh)


def test_threads_share_one_transfer(pool: KVPool) -> None:
    transfer = cuda.CudaTransfer(buffer_nbytes=1 << 20)
    slots = torch.randperm(SLOTS)
    source, wrong = slots[: 12 * 64], list[object]()
    wanted = reference(pool, source, 12)

    def save() -> None:
        for _ in range(5):
            pages = torch.zeros((12, pool.layout.page_nbytes), dtype=torch.uint8, pin_memory=True)
            transfer.gather(pool, pool.unit_table(source, 12), list(pages), transfer.fence(pool))
            wrong.extend([] if torch.equal(pages, wanted) else ["save"])

    def load(target: torch.Tensor) -> None:
        for _ in range(5):
            transfer.scatter(pool, pool.unit_table(target, 12), list(wanted), transfer.fence(pool))
        wrong.extend([] if torch.equal(reference(pool, target, 12), wanted) else ["load"])

    targets = [slots[start : start + 12 * 64] for start in (12 * 64, 24 * 64, 36 * 64)]
    threads = [threading.Thread(target=save) for _ in range(3)]
    threads += [threading.Thread(target=load, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_unsupported_pool_and_options_are_refused() -> None:
    transfer = cuda.CudaTransfer(buffer_nbytes=64 << 10)
    layout = PageLayout(4, (LayerGroup("g", (0,), (Plane("x", "uint8", (4,)),)),))
    pool = KVPool(layout, {("g", 0, "x"): torch.empty((8, 4), dtype=torch.uint8)})
    with pytest.raises(InvalidRequest, match="the pool is on cpu, this transfer serves cuda:0"):
        transfer.fence(pool)
    with pytest.raises(ConfigError, match="device=cpu must be a CUDA device"):
        cuda.CudaTransfer("cpu")
    with pytest.raises(ConfigError, match=r"blocks=0 must be in 1\.\.1024"):
        cuda.CudaTransfer(blocks=0)


def test_memory_is_registered_once_by_its_range() -> None:
    """Overlaps are detected without CUDA, since its tools report each refused call as an error."""
    host, whole = cuda.CudaTransfer(buffer_nbytes=64 << 10).device.host, mmap.mmap(-1, 1 << 20)
    address = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
    start, half = address + (1 << 18), 1 << 19
    assert not host.locked([start, start + 4096], 4096)
    host.register(start, half)
    for first, nbytes in (
        (start, half),
        (address, 1 << 20),
        (start + 4096, 4096),
        (address, (1 << 18) + 1),
    ):
        with pytest.raises(
            ConfigError, match=f"can not page-lock {nbytes} bytes at 0x.* is registered already"
        ):
            host.register(first, nbytes)
    pinned = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
    assert host.locked([start + half - 4096, start], 4096)
    assert host.locked([start, pinned.data_ptr()], 4096)
    assert not host.locked([start, address], 4096)
    assert not host.locked([start + half - 4095], 4096)
    host.unregister(start)
    assert not host.locked([start], 4096)
    host.register(start + 8192, 4096)  # next to the freed range and at its place
    host.register(start, 4096)
    for first in (start + 8192, start):
        host.unregister(first)
    with pytest.raises(ConfigError, match="no memory is registered at 0x"):
        host.unregister(start)
