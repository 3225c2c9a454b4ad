"""What the documents say that a namespace holds, where nothing else that changes with it would show: with a revision by
hand the checkpoint, and the configuration in it, is not read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from claims import YARN
from test_table import ADAPTERS

VOUCHED = {"options": {"revision": "r1"}}


class MLAAttentionSpec(SimpleNamespace):
    """Another kind of group, of the same shape."""


OTHER_CONFIG: dict[str, Any] = {"config": {"rope_scaling": YARN}}
OTHER_HASH = {"cache_config.prefix_caching_hash_algo": "sha256_cbor"}


@pytest.mark.parametrize(
    ("adapter", "way"),
    [
        ("vLLM connector", OTHER_CONFIG),
        ("vLLM connector", OTHER_HASH),
        ("vLLM connector", {"parallel_config.cp_kv_cache_interleave_size": 2}),
        ("vLLM connector", {"spec": MLAAttentionSpec}),
        ("vLLM tier", OTHER_CONFIG),
        ("vLLM tier", OTHER_HASH),
        ("SGLang HiCache", OTHER_CONFIG),
        ("SGLang linker", OTHER_CONFIG),
        ("LightLLM", OTHER_CONFIG),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_fact_counts_by_itself(adapter: str, way: dict[str, Any], tmp_path: Path) -> None:
    namespace = ADAPTERS[adapter].namespace
    usual = namespace(tmp_path, VOUCHED)
    assert namespace(tmp_path, VOUCHED).digest == usual.digest
    assert namespace(tmp_path, {**VOUCHED, **way}).digest != usual.digest
