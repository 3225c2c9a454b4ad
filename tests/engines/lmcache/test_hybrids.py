"""Hybrid models: objects of states beside those of attention, by LMCache's own rules.

With `--separate-object-groups` a recurrent state is an object of its own, in a group of its own,
and LMCache stores one only for chunks at whose end vLLM kept a state. Its fold of the groups makes
a hit end at such a chunk.
"""

import logging
from typing import Any

import pytest
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.bitmap_ops.fold import fold_grouped, unfold_grouped
from lmcache.v1.kv_layer_groups import ObjectGroupInfo
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import all_null_chunk_masks

CHUNKS = 6
ATTENTION, STATE = {"object_group_id": 0}, {"object_group_id": 1}
WINDOWS = [-1, 1]  # chunks that a hit needs: of attention all, of states the last
STATE_SHAPE = (3, 64)


def bitmap(bits: list[bool]) -> Any:
    made = Bitmap(len(bits))
    for position, bit in enumerate(bits):
        if bit:
            made.set(position)
    return made


def looked_up(driver: Any, keys_of: Any, count: int = CHUNKS) -> tuple[int, list[Any]]:
    """Return the hit in chunks, and the chunks to load of each group, as LMCache computes both."""
    found = [bitmap(driver.lookup(keys_of(count, **group))) for group in (ATTENTION, STATE)]
    servable = fold_grouped(found, WINDOWS)
    length = next((end for end in range(count, 0, -1) if servable.test(end - 1)), 0)
    return length, unfold_grouped(length, count, WINDOWS)


def test_hit_ends_at_a_chunk_with_a_state(driver: Any, keys_of: Any, objects_of: Any) -> None:
    attention, states = keys_of(CHUNKS, **ATTENTION), keys_of(CHUNKS, **STATE)
    kept = [1, 4]  # vLLM kept states at the end of these chunks
    sources = objects_of(2, STATE_SHAPE)
    assert driver.store(attention, objects_of(CHUNKS)).is_successful()
    assert driver.store([states[i] for i in kept], sources).is_successful()
    length, wanted = looked_up(driver, keys_of)
    assert length == 5
    assert [i for i in range(CHUNKS) if wanted[1].test(i)] == [4]
    (target,) = objects_of(1, STATE_SHAPE, fill=False)
    assert driver.load([states[4]], [target]) == [True]
    assert bytes(target.byte_array) == bytes(sources[1].byte_array)
    assert looked_up(driver, keys_of, 4)[0] == 2, "no state after chunks 2 and 3"
    driver.adapter.delete([states[4]])
    assert looked_up(driver, keys_of)[0] == 2
    driver.adapter.delete([attention[0]])
    assert looked_up(driver, keys_of)[0] == 0, "a state without its attention is no hit"


def test_state_of_another_dtype_or_group_is_never_loaded(
    spec: Any, open_adapter: Any, shared_node: Any, keys_of: Any, objects_of: Any
) -> None:
    driver = open_adapter(spec("plugin", shared_node.address))
    states = keys_of(1, **STATE)
    assert driver.store(states, objects_of(1, STATE_SHAPE)).is_successful()
    for keys, kind in [
        (states, {"dtype": torch.bfloat16}),
        (keys_of(1, **ATTENTION), {}),
        (keys_of(1, object_group_id=2), {}),
        (keys_of(1, **STATE, kv_rank=0x02010201), {}),
    ]:
        assert driver.load(keys, objects_of(1, STATE_SHAPE, fill=False, **kind)) == [False]


def test_lmcache_stores_states_that_vllm_does_not_have() -> None:
    """LMCache's own faults, which docs/engines/lmcache.md names: a store can not see them.

    Block 0 is vLLM's null block: there is no state. If this test fails, LMCache was repaired.
    """

    def stored(groups: list[list[int]], blocks_per_chunk: int, states: list[int]) -> list[Any]:
        attention = [7 + i for i in range(len(states))]
        masks = all_null_chunk_masks(
            [attention, states],
            [ObjectGroupInfo(kernel_group_indices=group) for group in groups],
            [blocks_per_chunk] * 2,
            len(states) // blocks_per_chunk,
        )
        return [[not null for null in mask] for mask in masks]

    separate, fused = [[0], [1]], [[0, 1]]
    assert stored(separate, 1, [0, 0, 9]) == [[True] * 3, [False, False, True]]
    assert stored(fused, 1, [0, 0, 9]) == [[True] * 3], "objects of two chunks have no state"
    # The state at the end of the first chunk is missing; that in its middle is of other tokens
    assert stored(separate, 2, [9, 0, 0, 9])[1] == [True, True]


def test_objects_with_several_layer_groups_are_logged_once(
    spec: Any,
    open_adapter: Any,
    shared_node: Any,
    keys_of: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = open_adapter(spec("plugin", shared_node.address))
    nbytes = 2 * 3 * 64 * 2
    fused = TensorMemoryObj(
        torch.zeros(nbytes, dtype=torch.uint8),
        MemoryObjMetadata(
            shape=torch.Size([nbytes]),
            dtype=torch.uint8,
            address=0,
            phy_size=nbytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
            shapes=[torch.Size((2, 1, 3, 64)), torch.Size((2, 1, 3, 64))],
            dtypes=[torch.uint8, torch.bfloat16],
        ),
        parent_allocator=None,
    )
    with caplog.at_level(logging.WARNING):
        for first in range(2):
            assert driver.store(keys_of(1, first), [fused]).is_successful()
    (said,) = [record for record in caplog.records if "--separate-object-groups" in record.message]
    assert said.name == "gpu_agent.engines.lmcache"
