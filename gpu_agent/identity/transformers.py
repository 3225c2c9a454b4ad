"""Name the KV of a transformers model, and refuse models whose KV cannot be shared.

transformers is not imported: the model's attributes are read.
"""

from typing import Any

import torch

from gpu_agent.identity.checkpoint import config_digest, is_length_dependent, length_dependent
from gpu_agent.options import facts_text
from gpu_agent.pool import dtype_name
from kvstore.buffers import byte_view
from kvstore.checksum import running_digest
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import LayerGroup, PageLayout, Plane
from kvstore.security.secrets import DEFAULT_TENANT

KV_GROUP = "attention"


def model_namespace(
    model: Any,
    name: str,
    revision: str | None,
    page_tokens: int,
    key_id: str = "",
    tenant: str = DEFAULT_TENANT,
) -> Namespace:
    """Return the namespace of a model's KV, salted with its configuration's digest.

    Without a revision the weights are digested. `key_id` names the key of its HMACs. Raises
    InvalidRequest for a model whose KV depends on more than its tokens.
    """
    check_model(model)
    text: Any = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = dtype_name(model.dtype)
    planes = (Plane("k", dtype, (heads, dim)), Plane("v", dtype, (heads, dim)))
    layout = PageLayout(
        page_tokens, (LayerGroup(KV_GROUP, tuple(range(text.num_hidden_layers)), planes),)
    )
    facts = facts_text("transformers", config=config_digest(model.config.to_dict()))
    revision = weights_digest(model) if revision is None else revision
    return Namespace(
        model=name, layout=layout, tenant=tenant, revision=revision, salt=facts, key_id=key_id
    )


def check_model(model: Any) -> None:
    """Raise InvalidRequest for a model whose KV depends on more than its tokens.

    Recurrent models are refused, also those whose state lies outside the cache (RWKV, xLSTM). A
    state is valid after one token only, and from it transformers 5.24 computes several tokens
    wrongly for Jamba and Mamba.
    """
    config = model.config
    if getattr(model, "_is_stateful", False):
        raise InvalidRequest(
            f"{type(model).__name__} keeps a recurrent state, which can not be stored; only models "
            "of attention layers can"
        )
    if config.is_encoder_decoder:
        raise InvalidRequest(
            "the model has an encoder, whose input its KV depends on and its tokens do not show"
        )
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise InvalidRequest(
            "the model takes images, sound or video, all of which have the same token ids; store "
            "the KV of its text model, if it has one of its own"
        )
    if (
        getattr(text, "use_bidirectional_attention", None)
        or getattr(text, "is_causal", True) is False
    ):
        raise InvalidRequest(
            "the model looks at later tokens: the KV of a prefix depends on what follows it"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise InvalidRequest(
            "the model is one of several in a tensor-parallel group; it has a part of the heads "
            "only"
        )
    kinds = sorted(
        {*length_dependent(config.to_dict()), *filter(is_length_dependent, _rope_kinds(model))}
    )
    if kinds:
        raise InvalidRequest(
            f"the model has rotary embeddings of the kind {kinds[0]!r}: their angles depend on the "
            "longest prompt of a batch and on those before it, so that the KV of a short prompt is "
            "not the beginning of a long one's"
        )
    check_adapters(model)


def check_adapters(model: Any) -> None:
    """Raise InvalidRequest if a LoRA or another adapter was added; they can change at run time."""
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None):
        raise InvalidRequest(
            "the model has adapters (LoRA), which can be switched without a trace in its name; "
            "merge the one that is wanted into the weights (merge_and_unload) and give that model "
            "a name or revision of its own"
        )


def _rope_kinds(model: Any) -> set[str]:
    """Return the rotary embeddings of the layers, which they read when they are made."""
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = {kind for kind in found if isinstance(kind, str)}
    return kinds.union(*(kind.values() for kind in found if isinstance(kind, dict)))


def weights_digest(model: Any) -> str:
    """Return xxh3_128 over names, shapes, dtypes and bytes of all parameters and buffers."""
    running = running_digest()
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, tensor in state.items():
        running.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        running.update(byte_view(tensor.detach().cpu().contiguous()))
    return f"weights={running.digest().hex()}"
