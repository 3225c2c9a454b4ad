"""The bridge's events, decoded by vLLM's own structs; and hashes of prompts equal vLLM's."""

import warnings

import pytest

pytest.importorskip("msgpack", reason="needs msgpack, of the extra `events`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    import msgspec
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

from routed_events import as_map

from kvstore.bridge.wires import VllmWire
from kvstore.tools.prompts import Hashing

pytestmark = pytest.mark.filterwarnings("default")
A, B = b"a" * 32, b"b" * 32


@pytest.mark.parametrize("form", ["bytes", "low64", "sglang"])
def test_events_are_those_of_vllm(form: str) -> None:
    wire = VllmWire("store", "m", form)
    events = [*wire.cleared(), *wire.stored(16, [A, B]), *wire.removed([A])]
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(wire.packed(events))
    _, stored, removed = batch.events
    assert [type(event) for event in batch.events] == [AllBlocksCleared, BlockStored, BlockRemoved]
    assert (stored.medium, stored.locality, stored.ownership) == ("STORAGE", "REMOTE", "store")
    assert (stored.block_size, stored.token_ids, stored.parent_block_hash) == (16, [], None)
    assert len(stored.block_hashes) == 2
    if form == "bytes":
        assert (stored.block_hashes, removed.block_hashes) == ([A, B], [A])
    if form == "low64":
        low = kv_cache_utils.maybe_convert_block_hash(A)
        assert low == A or removed.block_hashes == [low]
    # No field but those that vLLM has
    for sent, event in zip(events, batch.events, strict=True):
        assert sent.keys() <= as_map(event).keys()


@pytest.mark.parametrize("seed", [None, "0", "a seed of 30 characters or more"])
@pytest.mark.parametrize("name", ["sha256", "sha256_cbor"])
def test_hashes_are_those_of_vllm(
    name: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    for name_of_global in ("NONE_HASH", "_NONE_HASH_SEED"):
        monkeypatch.setattr(
            kv_cache_utils, name_of_global, getattr(kv_cache_utils, name_of_global, None), False
        )
    hash_of = get_hash_fn_by_name(name)
    kv_cache_utils.init_none_hash(hash_of)
    tokens = [*range(20, 30), 255, 256, 65_535, 65_536, 151_643, (1 << 32) - 1] * 4
    expected, parent = [], None
    for start in range(0, len(tokens), 16):
        parent = kv_cache_utils.hash_block_tokens(hash_of, parent, tokens[start : start + 16])
        expected.append(parent)
    assert Hashing(f"vllm-{name.replace('_', '-')}", seed).of(tokens, 16) == expected
