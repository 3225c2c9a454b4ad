"""The kernel in leaves.cu, compared with the xxHash library on random bytes."""

import uuid

import pytest
import torch
from page_pools import WAIT_S
from waiting import PATIENT

from gpu_agent import Agent, AgentConfig, KVPool
from gpu_agent.kernels import staged
from kvstore import Client, ClientConfig, LayerGroup, Namespace, PageLayout, Plane, prefix_hashes
from kvstore.checksum import LEAF_NBYTES, leaves
from kvstore.tools.node_process import NodeProcess

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
cuda = pytest.importorskip("gpu_agent.kernels.cuda", reason="needs cupy")

MIB = LEAF_NBYTES
# Sizes around everything the kernel counts in: stripes, blocks, turns of 60 blocks, parts.
SIZES = [
    248,
    256,
    1016,
    1024,
    1032,
    1088,
    2048,
    59 << 10,
    60 << 10,
    (60 << 10) + 8,
    (61 << 10) + 72,
    120 << 10,
]
SIZES += [
    (120 << 10) + 1024,
    MIB - 8,
    MIB,
    MIB + 8,
    2 * MIB - 8,
    2 * MIB,
    3 * MIB + 520,
    15 * MIB + 8,
]
SLOTS = 9


def pool_of(nbytes: int, gap: int = 0) -> KVPool:
    """Return a pool of pages of `nbytes` bytes in GPU memory, with `gap` bytes in between."""
    layout = PageLayout(1, (LayerGroup("g", (0,), (Plane("x", "uint8", (nbytes,)),)),))
    memory = torch.randint(0, 256, (SLOTS, nbytes + gap), dtype=torch.uint8, device="cuda")
    return KVPool(layout, {("g", 0, "x"): memory[:, :nbytes]})


@pytest.fixture(scope="module")
def transfer() -> "cuda.CudaTransfer":
    return cuda.CudaTransfer()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison the memory to which leaves are written."""
    memory = cuda.CudaDevice.host_memory
    monkeypatch.setattr(
        cuda.CudaDevice, "host_memory", lambda device, nbytes: memory(device, nbytes).fill_(0xEE)
    )


@pytest.mark.parametrize("as_runs", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_leaves_equal_those_of_the_library(
    transfer: "cuda.CudaTransfer", nbytes: int, as_runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "RUN_NBYTES_MIN", 1 if as_runs else 1 << 40)
    pool = pool_of(nbytes, gap=nbytes % 7 * 8)
    assert transfer.makes_leaves(pool)
    slots = torch.randperm(SLOTS)[:6]
    wanted = [leaves(pool.planes[0].bits[slot].cpu().numpy().tobytes()) for slot in slots.tolist()]
    pages = torch.full((6, nbytes), 0x5A, dtype=torch.uint8).pin_memory()
    found: list[bytes] = []
    transfer.gather(
        pool, pool.unit_table(slots, 6), list(pages), transfer.fence(pool), summed=found.extend
    )
    assert found == wanted == [leaves(page.numpy().tobytes()) for page in pages]

    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    found.clear()
    transfer.scatter(
        pool, pool.unit_table(slots, 6), list(pages), transfer.fence(pool), summed=found.extend
    )
    assert found == [leaves(page.numpy().tobytes()) for page in pages]
    assert torch.equal(pool.planes[0].bits[slots.cuda()].cpu(), pages)


def test_any_flipped_bit_changes_its_leaf(transfer: "cuda.CudaTransfer") -> None:
    pool, nbytes = pool_of(2 * MIB + 264), 2 * MIB + 264
    table, pages = (
        pool.unit_table(torch.tensor([4]), 1),
        torch.zeros((1, nbytes), dtype=torch.uint8).pin_memory(),
    )
    before: list[bytes] = []
    transfer.gather(pool, table, list(pages), None, summed=before.extend)
    places = [
        0,
        7,
        63,
        64,
        1023,
        1024,
        60 << 10,
        MIB - 1,
        MIB,
        nbytes - 257,
        nbytes - 65,
        nbytes - 64,
        nbytes - 1,
    ]
    for place in [*places, *torch.randint(0, nbytes, (40,)).tolist()]:
        pool.planes[0].bits[4, place] ^= 1 << place % 8
        after: list[bytes] = []
        transfer.gather(pool, table, list(pages), transfer.fence(pool), summed=after.extend)
        pool.planes[0].bits[4, place] ^= 1 << place % 8
        changed = [
            i for i in range(2) if before[0][8 * i : 8 * i + 8] != after[0][8 * i : 8 * i + 8]
        ]
        assert changed == [int(place >= MIB)]


@pytest.mark.parametrize("nbytes", [4096, 3 * MIB])
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_load_ends_at_a_page_damaged_in_the_node(
    shm_client: Client,
    shared_node: NodeProcess,
    transfer: "cuda.CudaTransfer",
    nbytes: int,
    bad: int | None,
) -> None:
    pool, hashes = pool_of(nbytes), prefix_hashes(list(range(4)), 1)
    namespace = Namespace(model=f"leaves-{uuid.uuid4()}", layout=pool.layout)
    expected = pool.planes[0].bits[:4].clone()
    config = AgentConfig(workers=1, staging_nbytes=4 * MIB)
    with Agent(shm_client, namespace, pool, config, transfer) as agent:
        assert agent.save(hashes, torch.arange(4)).done.result(WAIT_S).stored == 4
        with Client(ClientConfig(address=shared_node.address, wire="bulk", **PATIENT)) as other:
            pages = torch.empty((4, nbytes), dtype=torch.uint8)
            assert other.get(namespace, hashes, list(pages)) == [True] * 4
        assert torch.equal(pages, expected.cpu())
        if bad is not None:
            with shm_client.open_get(namespace, hashes) as slots:
                slots.arena.memory[slots.offsets[bad] + nbytes - 3] ^= 1
        loaded = agent.load(hashes, torch.arange(4, 8)).done.result(WAIT_S)
        count = 4 if bad is None else bad
        assert (loaded.pages, loaded.error) == (count, None)
        assert torch.equal(pool.planes[0].bits[4 : 4 + count], expected[:count])
