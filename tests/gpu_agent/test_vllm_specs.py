"""vLLM's kinds of KV cache, without vLLM: docs/engines/vllm.md has the table of the code."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_agent.engines.vllm_specs import SPECS, kind_of, layer_specs, refusal

DOCUMENT = Path(__file__).parents[2] / "docs/engines/vllm.md"


def spec(name: str, **fields: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**fields)


def test_document_has_the_table_of_the_code() -> None:
    _, table = DOCUMENT.read_text().split("| spec | connector | tier | why |\n")
    rows = [line.strip("|").split(" | ") for line in table.split("\n\n")[0].splitlines()[1:]]
    documented = {
        row[0].replace("`", "").strip(): [cell.strip() for cell in row[1:]] for row in rows
    }
    assert documented == {kind: list(verdict) for kind, verdict in SPECS.items()}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (spec("FullAttentionSpec", non_causal=False, prefix_cacheable=True), "FullAttentionSpec"),
        (spec("FullAttentionSpec", non_causal=True), "any, non-causal"),
        (spec("FullAttentionSpec", prefix_cacheable=False), "any other"),
        (spec("MambaSpec", mamba_cache_mode="align"), "MambaSpec, align"),
        (spec("MambaSpec", mamba_cache_mode="new"), "any other"),
        (spec("SlidingWindowMLASpec", bounded_replay=False), "SlidingWindowMLASpec"),
        (
            spec("SlidingWindowMLASpec", bounded_replay=True, prefix_cacheable=False),
            "SlidingWindowMLASpec, bounded replay",
        ),
        (spec("CircularBufferSpec", prefix_cacheable=False), "CircularBufferSpec"),
        (spec("Nobody'sSpec"), "any other"),
    ],
)
def test_spec_has_a_row_of_the_table(found: Any, kind: str) -> None:
    assert kind_of(found) == kind
    assert kind_of(found, host_resident=True) == "any, in host memory"


def test_refusal_names_the_class_and_the_reason() -> None:
    assert refusal(spec("FullAttentionSpec")) == ""
    assert re.fullmatch(r"RSWASpec \(.+\)", refusal(spec("RSWASpec")))
    layers = {"a": spec("RSWASpec"), "b": spec("FullAttentionSpec")}
    several = spec("UniformTypeKVCacheSpecs", kv_cache_specs=layers)
    assert layer_specs(several) == list(layers.values())
    assert layer_specs(layers["a"]) == [layers["a"]]
