"""Decide what happens with each kind of KV cache that vLLM has. Imports no vLLM.

`SPECS` is the table of docs/engines/vllm.md, whose tests fail when vLLM adds a class.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

STORED = "stored"
# A hit needs no page of the group, because it ends where the group's content is empty, as a hit in
# vLLM's own cache does.
LIMITS = "limits the hit"
REFUSED = "refused"


class Verdict(NamedTuple):
    """Treatment of a kind by connector and tier, and the reason if one does not store it."""

    connector: str
    tier: str
    reason: str = ""


# By the exact class: a subclass is another kind. A word after a comma is a property of the spec.
SPECS = {
    "FullAttentionSpec": Verdict(STORED, STORED),
    "MLAAttentionSpec": Verdict(STORED, STORED),
    "SlidingWindowSpec": Verdict(STORED, STORED),
    "ChunkedLocalAttentionSpec": Verdict(STORED, STORED),
    "SlidingWindowMLASpec": Verdict(STORED, REFUSED, "not tested with the tier"),
    "SlidingWindowMLASpec, bounded replay": Verdict(
        REFUSED, REFUSED, "a window that vLLM rebuilds only nearly, which later KV would inherit"
    ),
    "CircularBufferSpec": Verdict(LIMITS, REFUSED, "a ring that is empty at the end of a hit"),
    "MambaSpec, align": Verdict(STORED, STORED),
    "MambaSpec, none": Verdict(REFUSED, REFUSED, "no prefix caching, so no states to store"),
    "MambaSpec, all": Verdict(
        REFUSED, REFUSED, "states that vLLM does not offer one by one: set align"
    ),
    "RSWASpec": Verdict(REFUSED, REFUSED, "KV that depends on where the prompt ended"),
    "SinkFullAttentionSpec": Verdict(REFUSED, REFUSED, "sinks, which no model of vLLM 0.33 has"),
    "HiddenStateCacheSpec": Verdict(REFUSED, REFUSED, "states of layers that no namespace names"),
    "HiSparseHotSpec": Verdict(REFUSED, REFUSED, "a copy of KV in host memory"),
    "HiSparseResidentSpec": Verdict(REFUSED, REFUSED, "a copy of KV in host memory"),
    "CrossAttentionSpec": Verdict(REFUSED, REFUSED, "KV of the encoder's input"),
    "EncoderOnlyAttentionSpec": Verdict(REFUSED, REFUSED, "no KV"),
    "any, non-causal": Verdict(REFUSED, REFUSED, "KV that depends on later tokens"),
    "any, in host memory": Verdict(REFUSED, REFUSED, "blocks of a pool of their own (HiSparse)"),
    "any other": Verdict(REFUSED, REFUSED, "a kind that this release of kvstore does not know"),
}


def layer_specs(spec: Any) -> Collection[Any]:
    """Return the specs of a group's layers, of which `UniformTypeKVCacheSpecs` has several."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def kind_of(spec: Any, host_resident: bool = False) -> str:
    """Return the row of `SPECS` for the spec of a layer."""
    if host_resident:
        return "any, in host memory"
    if getattr(spec, "non_causal", False):
        return "any, non-causal"
    kind = type(spec).__name__
    if kind == "MambaSpec":
        kind = f"{kind}, {spec.mamba_cache_mode}"
    elif getattr(spec, "bounded_replay", False):
        kind = f"{kind}, bounded replay"
    elif (
        not getattr(spec, "prefix_cacheable", True)
        and SPECS.get(kind, SPECS["any other"])[0] == STORED
    ):
        return "any other"
    return kind if kind in SPECS else "any other"


def refusal(spec: Any, host_resident: bool = False, route: str = "connector") -> str:
    """Return why a route refuses the spec of a layer; empty if it does not.

    `route`: "connector" or "tier", a field of `Verdict`.
    """
    verdict = SPECS[kind_of(spec, host_resident)]
    return f"{type(spec).__name__} ({verdict.reason})" if getattr(verdict, route) == REFUSED else ""
