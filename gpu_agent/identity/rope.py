"""Rotary embeddings whose angles depend on how long a prompt is, read from a model's configuration.

    dynamic         transformers: on the longest prompt since a short one; vLLM: on nothing; SGLang: on nothing;
                    LightLLM: on a token's own position
    longrope, su    transformers and SGLang: on the longest prompt of a batch; vLLM: on max_model_len; LightLLM: on
                    a token's own position
    all others      (linear, yarn, llama3, proportional, mrope) on nothing

A page is found by its tokens and those before it. Where its K depends on what comes after, or on what else was in
the batch, no key tells such pages apart.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def length_dependent(config: Mapping[str, Any]) -> list[str]:
    """The kinds of such embeddings that a configuration names, of any of its parts and layers."""
    return sorted({kind for kind in _kinds(config) if is_length_dependent(kind)})


def is_length_dependent(kind: str) -> bool:
    """transformers' rule; "su" is longrope's first name."""
    return "dynamic" in kind or kind in ("longrope", "su")


def _kinds(config: Mapping[str, Any], within: bool = False) -> Iterator[str]:
    """`within`: of an entry that is about rotary embeddings. Nested: one for each kind of layer."""
    for name, value in config.items():
        if name == "use_dynamic_ntk" and value:
            yield "dynamic"
        elif isinstance(value, Mapping):
            yield from _kinds(value, within or name.startswith("rope"))
        elif within and name in ("rope_type", "type") and isinstance(value, str):
            yield value
