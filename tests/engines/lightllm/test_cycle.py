"""Pages go out of one server's CPU cache and into another's, through LightLLM's own code."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.tools.node_process import NodeProcess

KINDS = ["bf16", "int8", "mla", "hybrid"]
Make = Callable[..., Any]


@pytest.mark.parametrize(
    "name",
    [
        "multi_level_kv_cache.cpu_cache_client",
        "multi_level_kv_cache.disk_cache_worker",
        "multi_level_kv_cache.manager",
        "core.objs.io_objs",
        "core.objs.token_chunck_hash_list",
        "multimodal_params",
    ],
)
def test_modules_are_lightllms_own(name: str) -> None:
    """No module used here, nor its imports, is a stand-in: the tests hold for LightLLM itself."""
    import lightllm

    root = Path(lightllm.__spec__.submodule_search_locations[0])
    module = importlib.import_module(f"lightllm.server.{name}")
    assert Path(module.__file__).is_relative_to(root)
    loaded = [name for name in ("librosa", "fastapi", "transformers") if name in sys.modules]
    assert all(importlib.util.find_spec(name).origin for name in loaded)


@pytest.mark.parametrize(
    ("page_tokens", "digests"),
    [
        (64, ["a1b08625b32be0034ed0aca2fb9ea990", "d7ec162e89a637ddcae42271e3465a49"]),
        (256, ["be9f5cae5cfe50ca85f191a37ffbd0b6", "ba9734bbe8d6120ee1d6ed026a101dd8"]),
    ],
)
def test_hashes_equal_recorded_values(page_tokens: int, digests: list[str]) -> None:
    """Stored pages are looked up by these hashes, so a changed hash would lose all of them."""
    from lightllm.utils.kv_cache_utils import compute_token_list_hash

    tokens = list(range(2 * page_tokens + 1))
    assert [f"{value:032x}" for value in compute_token_list_hash(tokens, page_tokens)] == digests
    # One token is always left to compute.
    assert len(compute_token_list_hash(tokens[:-1], page_tokens)) == 1


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
@pytest.mark.parametrize("kind", KINDS)
def test_page_round_trip_preserves_bytes(
    node: NodeProcess, make_server: Make, kind: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_WIRE", wire)
    server = make_server(node.address, kind)
    hashes = server.hashes(1, 5)
    pages = server.compute(hashes)
    before = server.memory.clone()
    server.persist()
    assert server.references() == 0
    server.memory[:] = 0xA5
    assert server.worker.query_loadable_pages(hashes, 0) == 5
    assert server.worker.load_pages(hashes, pages, 0)
    assert torch.equal(server.memory[pages], before[pages])
    others = [page for page in range(len(server.memory)) if page not in pages]
    assert (server.memory[others] == 0xA5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_pages_saved_by_one_server_are_loaded_by_another(
    node: NodeProcess, make_server: Make, kind: str
) -> None:
    first = make_server(node.address, kind)
    hashes = first.hashes(2, 6)
    written = first.compute(hashes[:4])
    first.persist()
    second = make_server(node.address, kind)
    second.memory[:] = 0xA5
    given = second.match(hashes)
    assert second.loaded_tokens == 4 * 64
    assert torch.equal(second.memory[given], first.memory[written])
    assert second.references() == 4
    second.release(given)
    assert (first.references(), second.references()) == (0, 0)


def test_only_pages_missing_in_memory_are_loaded(node: NodeProcess, make_server: Make) -> None:
    first, second = make_server(node.address), make_server(node.address)
    hashes = first.hashes(3, 5)
    written = first.compute(hashes)
    first.persist()
    mine = second.compute(hashes[:2])
    second.memory[mine] = 0x11  # to see whether they are overwritten
    given = second.match(hashes)
    assert given[:2] == mine
    assert (second.memory[mine] == 0x11).all()
    assert second.loaded_tokens == 3 * 64
    assert torch.equal(second.memory[given[2:]], first.memory[written[2:]])
    second.release(given)
    second.persist()
    assert second.references() == 0


def test_stored_pages_are_released_before_others_are_saved(
    node: NodeProcess, make_server: Make
) -> None:
    server = make_server(node.address)
    hashes = server.hashes(4, 6)
    server.compute(hashes[:3])
    server.persist()
    server.compute(hashes)
    indexer = torch.tensor(
        server.locked(server.client.allocate_pages, hash_keys=hashes, disk_offload_enable=True)[0]
    )
    task = server.service.create(hash_128s=hashes, kv_page_indexer=indexer.int(), mode="w")
    assert task.page_already_list == indexer[:3].tolist()
    server.settle()
    assert task.page_already_list == indexer[:3].tolist()
    server.release(indexer.tolist())
    server.persist()
    assert server.references() == 0


def test_full_pool_saves_a_prefix(node: NodeProcess, make_server: Make) -> None:
    server = make_server(node.address)
    kept = server.locked(
        server.client.allocate_pages, hash_keys=server.hashes(5, 20), disk_offload_enable=True
    )[0]
    hashes = server.hashes(6, 8)
    assert len(server.compute(hashes)) == 4  # of 24 pages, 20 are taken
    server.persist()
    assert server.worker.query_loadable_pages(hashes, 0) == 4
    server.locked(server.client.recycle_pages, page_list=kept)
    assert server.references() == 0


def test_stored_prefix_larger_than_pool_loads_in_part(node: NodeProcess, make_server: Make) -> None:
    first, second = make_server(node.address), make_server(node.address)
    hashes = first.hashes(7, 20)
    written = first.compute(hashes)
    first.persist()
    taken = second.locked(
        second.client.allocate_pages, hash_keys=second.hashes(8, 14), disk_offload_enable=True
    )[0]
    given = second.match(hashes)
    assert len(given) == 10
    assert torch.equal(second.memory[given], first.memory[written[:10]])
    second.release(given)
    second.locked(second.client.recycle_pages, page_list=taken)
    assert second.references() == 0


def test_concurrent_requests_load_the_same_pages(node: NodeProcess, make_server: Make) -> None:
    """A request may get a page that another one is loading; all loads write the same bytes."""
    first, second = make_server(node.address), make_server(node.address)
    hashes = first.hashes(9, 8)
    written = first.compute(hashes)
    first.persist()
    given: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: given.append(second.match(hashes))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 8
    assert all(pages == given[0] and len(pages) == 8 for pages in given)
    assert torch.equal(second.memory[given[0]], first.memory[written])
    assert second.references() == 64
    for pages in given:
        second.release(pages)
    assert second.references() == 0


def test_service_blocks_are_single_pages(node: NodeProcess, make_server: Make) -> None:
    """The service is ours, with blocks of `_n` = 1 page.

    LightLLM aligns loads to blocks of `_n` pages; with 1 it never rewrites a page in use.
    """
    server = make_server(node.address)
    assert type(server.service).__module__ == "gpu_agent.engines.lightllm"
    assert server.service._n == 1
    assert server.service.query([]) == []
