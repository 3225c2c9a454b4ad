"""One rank of test_ranks.py: `rank.py RANK JOB`.

Prints its results as JSON.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engines" / "sglang" / "stubs")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import PAGE, Engine, fill, mamba, mha, mla, page_bytes, parallel  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402

PAGES = 10
TOKENS = list(range(PAGES * PAGE))
SLOTS = torch.arange(len(TOKENS))
TARGET = SLOTS + 512


def forget(engine: Any, page: int) -> None:
    key = bytes.fromhex(engine.hashes(TOKENS)[page])
    assert engine.backend._client.remove(engine.backend._pages["kv"].namespace, [key]) == [True]


def right(engine: Any, pages: int, expected: list[bytes]) -> bool:
    return page_bytes(engine.host, TARGET)[:pages] == expected[:pages]


def heads(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    engine = Engine([mha()], config, tp_group=dist.group.WORLD)
    fill(engine.host)
    expected = page_bytes(engine.host, SLOTS)
    stored = engine.backup(TOKENS, SLOTS).completed_tokens
    if rank == 1:
        forget(engine, 7)
    dist.barrier()
    operation = engine.query(TOKENS)
    if rank == 0:
        forget(engine, 3)
    dist.barrier()
    loaded, _ = engine.fetch(operation, TARGET)
    engine.detach()
    return {
        "stored": stored // PAGE,
        "hit": operation.storage_hit_count // PAGE,
        "loaded": loaded // PAGE,
        "right": right(engine, 3, expected),
    }


def states(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    engine = Engine([mha(), mamba()], config, tp_group=dist.group.WORLD)
    keys, host = engine.hashes(TOKENS), engine.hosts[PoolName.MAMBA]
    fill(host)
    engine.backup(TOKENS, SLOTS)
    for slot, length in enumerate((3, 6, 9 if rank == 0 else 8)):
        state = PoolTransfer(
            name=PoolName.MAMBA, keys=[keys[length - 1]], host_indices=torch.tensor([slot])
        )
        assert engine.backend.batch_set_v2([state], extra_info=None) == {PoolName.MAMBA: [True]}
    dist.barrier()
    asked = PoolTransfer(
        name=PoolName.MAMBA,
        keys=keys[-1:],
        host_indices=torch.tensor([20]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    operation = engine.query(TOKENS, [asked])
    engine.fetch(operation, TARGET)
    engine.detach()
    return {
        "restorable": operation.pool_storage_result.restorable_prefix_pages,
        "hit": operation.storage_hit_count // PAGE,
        "loaded": operation.pool_storage_result.extra_pool_hit_pages[PoolName.MAMBA],
        "right": len({*page_bytes(host, torch.tensor([1, 20]))}) == 1,
    }


def latents(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    engine = Engine([mla()], config, tp_group=dist.group.WORLD)
    torch.manual_seed(3)
    fill(engine.host)  # the same on both, as latents are
    expected = page_bytes(engine.host, SLOTS)
    backend, sets = engine.backend, []
    inner = backend.batch_set_v1
    backend.batch_set_v1 = lambda *args: sets.append(1) or inner(*args)
    engine.backup(TOKENS, SLOTS)
    dist.barrier()
    loaded, _ = engine.fetch(engine.query(TOKENS), TARGET)
    dist.barrier()
    found = {"sets": len(sets), "loaded": loaded // PAGE, "right": right(engine, PAGES, expected)}
    engine.controller.clear_storage_backend()
    dist.barrier()
    found["after clear"] = engine.query(TOKENS).storage_hit_count // PAGE
    engine.backup(TOKENS, SLOTS)
    dist.barrier()
    found["stored again"] = engine.query(TOKENS).storage_hit_count // PAGE
    engine.detach()
    return found


def main() -> None:
    rank, job = int(sys.argv[1]), json.loads(sys.argv[2])
    scenarios: tuple[Callable[[int, dict[str, Any]], dict[str, Any]], ...] = (
        heads,
        states,
        latents,
    )
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=2
    )
    found = {}
    with parallel(rank, 2):
        for scenario in scenarios:
            revision = f"{scenario.__name__} {job['revision']}"
            found[scenario.__name__] = scenario(rank, {**job["config"], "revision": revision})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
