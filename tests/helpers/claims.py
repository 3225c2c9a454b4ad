"""The claims of docs/identity.md, and settings that test each claim.

    Claims = adapter -> ingredient -> word of the table cell -> ways to change the ingredient

A way is an argument of an adapter's `namespace(tmp_path, way)`: the engine settings that differ
from the defaults, or from another way, its `unlike`.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvstore import Namespace

Way = Mapping[str, Any]
# Namespace, refused, no: a list of ways; hash: "file::test" run in the engine's environment
Words = Mapping[str, Any]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_numbers = itertools.count()


class Adapter(NamedTuple):
    namespace: Callable[[Path, Way], Namespace]
    claims: Mapping[str, Words]


def checkpoint(tmp_path: Path, way: Way) -> str:
    """Create a checkpoint in a new directory and return its path.

    Keys of `way`: `name`, `weights`, and `config` for changes of the configuration.
    """
    directory = tmp_path / str(next(_numbers)) / way.get("name", "tiny")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **way.get("config", {})}))
    (directory / "model.safetensors").write_bytes(way.get("weights", b"weights"))
    return str(directory)


def tree(**branches: Any) -> SimpleNamespace:
    return SimpleNamespace(**branches)


def changed(root: Any, way: Way) -> Any:
    """Set the attributes of `root` that `way` names by path, such as "model_config.dtype"."""
    for path, value in way.items():
        *parents, leaf = path.split(".")
        if not hasattr(root, path.partition(".")[0]):
            continue
        place = root
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, leaf, value)
    return root
