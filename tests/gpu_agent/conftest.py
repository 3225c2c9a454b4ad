"""Fixtures of the agent's tests: pools filled with random bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from block_store import MakeStore, Store

from gpu_agent import KVPool
from kvstore import Client, ClientConfig, LayerGroup, PageLayout, Plane
from kvstore.tools.node_process import NodeProcess


def random_tensor(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return random bytes viewed as `dtype`, including NaNs with payloads."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # torch.manual_seed would record the stack for each absent kind of GPU.
    torch.default_generator.manual_seed(20)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the agent's buffers: writing the default 128 MiB takes longer than most tests."""
    monkeypatch.setenv("KVSTORE_AGENT_STAGING_BYTES", str(1 << 20))


@pytest.fixture
def token_pool() -> KVPool:
    """Make two layers of K and V, 96 token slots, with pages of 8 tokens and 1 KiB."""
    planes = (Plane("k", "bfloat16", (2, 8)), Plane("v", "bfloat16", (2, 8)))
    layout = PageLayout(8, (LayerGroup("attention", (0, 1), planes),))
    tensors = {
        ("attention", layer, name): random_tensor(96, 2, 8, dtype=torch.bfloat16)
        for layer in (0, 1)
        for name in ("k", "v")
    }
    return KVPool(layout, tensors)


@pytest.fixture
def mixed_pool() -> KVPool:
    """Make token slots for KV and blocks of 4 tokens for an indexer, with pages of 8 tokens."""
    groups = (
        LayerGroup("kv", (0, 1), (Plane("latent", "float8_e4m3fn", (1, 12)),)),
        LayerGroup("indexer", (1,), (Plane("keys", "uint8", (20,), unit_tokens=4),)),
    )
    tensors = {
        ("kv", 0, "latent"): random_tensor(40, 1, 12, dtype=torch.float8_e4m3fn),
        ("kv", 1, "latent"): random_tensor(40, 1, 12, dtype=torch.float8_e4m3fn),
        ("indexer", 1, "keys"): random_tensor(10, 20),
    }
    return KVPool(PageLayout(8, groups), tensors)


@pytest.fixture
def shm_client(shared_node: NodeProcess) -> Iterator[Client]:
    with Client(
        ClientConfig(
            address=shared_node.address, wire="shm", timeout_s=60.0, connect_timeout_s=30.0
        )
    ) as client:
        yield client


@pytest.fixture
def stores(shared_node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Return a function that makes `Store`s in one namespace per test."""
    made: list[Store] = []
    with Client(
        ClientConfig(address=shared_node.address, timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:

        def make(**options: Any) -> Store:
            made.append(Store(client, f"scheduler {request.node.name}", **options))
            return made[-1]

        yield make
        for store in made:
            store.close()
