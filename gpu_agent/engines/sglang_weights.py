"""Read which weights an SGLang server has from its own arguments, for both adapters."""

import dataclasses
import json
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import get_server_args, get_serving, process_model_config
from sglang.srt.utils.hf_transformers_utils import get_config

from gpu_agent.identity.sglang import weights
from gpu_agent.identity.sglang_shards import ModelShape
from gpu_agent.options import Identity
from kvstore.errors import ConfigError


def served_weights(identity: Identity, served_name: str | None) -> tuple[Identity, dict[str, Any]]:
    """Return the identity and facts of the served weights.

    A backend only gets the served name, which anyone may choose; the server's arguments say more.
    Raises ConfigError if these are missing and the options name no weights.
    """
    try:
        args = get_server_args()
    except ValueError as error:
        if not identity.revision:
            raise ConfigError('the weights have no name: set "revision" (and "model")') from error
        return dataclasses.replace(identity, model=identity.model or served_name or ""), {
            "draft": served_name
        }
    return weights_of(identity, args)


def weights_of(identity: Identity, args: Any) -> tuple[Identity, dict[str, Any]]:
    """Return the weights of a server with these arguments. Raises ConfigError."""
    config = model_config(args)

    def native() -> bool:
        # The server has imported it already where it is needed
        from sglang.srt.models.registry import (
            ModelRegistry,
        )

        return any(map(ModelRegistry.is_arch_supported, config.get("architectures") or ()))

    return weights(identity, args, config, not envs.SGLANG_USE_MODELSCOPE.get(), native)


def model_config(args: Any) -> dict[str, Any]:
    """Return the model's configuration as the server has it. Raises ConfigError."""
    overrides = json.loads(args.json_model_override_args or "{}")
    parser = getattr(args, "model_config_parser", "auto")
    try:
        found = get_config(
            args.model_path, args.trust_remote_code, args.revision, overrides, parser
        )
    except Exception as error:  # any error of a model's own code
        raise ConfigError(
            f"the configuration of {args.model_path} can not be read again, so it is unknown "
            f"whether its pages can be shared: {error}; serve the model from a directory"
        ) from error
    config: dict[str, Any] = found.to_dict()
    return config


def model_shape() -> ModelShape | None:
    """Return the layers and KV heads of the served model, from which SGLang made its pools.

    None outside a server. Raises ConfigError.
    """
    try:
        get_server_args()
    except ValueError:
        return None
    try:
        config = process_model_config()
        return ModelShape(
            max(config.num_hidden_layers, config.num_attention_layers),
            {
                PoolName.KV.value: config.get_total_num_kv_heads(),
                PoolName.SWA.value: config.get_swa_num_kv_heads(1),
            },
        )
    except Exception as error:  # any error of a model's own code
        raise ConfigError(
            f"head_shards, layer_shards: the model's configuration can not be read: {error}; leave "
            "the options out"
        ) from error


def weight_version() -> str:
    """Return the version of the weights in use, as the last update named it."""
    try:
        return str(get_serving().weight_version)
    except ValueError:  # not in a server
        return ""
