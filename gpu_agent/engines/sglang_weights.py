"""Which weights an SGLang server has, from its own arguments: what both adapters put into a namespace."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_server_args, get_serving

from gpu_agent.checkpoint import named
from gpu_agent.options import Identity
from kvstore.errors import ConfigError

GENERATION = 1  # of what a page's bytes mean; raised when SGLang changes that under the same shapes


def served_weights(identity: Identity, served_name: str | None) -> tuple[Identity, dict[str, Any]]:
    """The engine tells a backend only the name that it serves under, which anyone may choose; its arguments
    say more. Raises ConfigError if they are not there and the options name no weights either."""
    try:
        args = get_server_args()
    except ValueError as error:
        if not identity.revision:
            raise ConfigError('the weights have no name: set "revision" (and "model")') from error
        return dataclasses.replace(identity, model=identity.model or served_name or ""), {"draft": served_name}
    return weights(identity, args)


def weight_version() -> str:
    """Of the weights in use, as the last update named it; the engine says it to this process only."""
    try:
        return str(get_serving().weight_version)
    except ValueError:  # no server
        return ""


def weights(identity: Identity, args: Any) -> tuple[Identity, dict[str, Any]]:
    """Which weights, and what else of the server's arguments decides what KV they make."""
    names = ("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "load_format", "weight_version")
    facts = {name: getattr(args, name) for name in names}
    scales = args.quantization_param_path
    facts["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else ""
    facts["draft"] = f"{args.speculative_draft_model_path}@{args.speculative_draft_model_revision}"
    return named(identity, args.model_path, args.revision or ""), facts
