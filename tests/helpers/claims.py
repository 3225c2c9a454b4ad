"""What docs/identity.md claims, and how a claim is tried.

    Claims = adapter -> ingredient -> word of the cell -> ways to change the ingredient

A way is what an adapter's `namespace(tmp_path, way)` takes: its engine's settings that are other
than usual; or other than those of another way, its `unlike`.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvstore import Namespace

Way = Mapping[str, Any]
# Namespace, refused, no: a list of ways; hash: "file::test" in the engine's environment
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
    """A directory of its own.

    Of a way: `name`, `weights`, and `config`, what the configuration has otherwise.
    """
    directory = tmp_path / str(next(_numbers)) / way.get("name", "tiny")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **way.get("config", {})}))
    (directory / "model.safetensors").write_bytes(way.get("weights", b"weights"))
    return str(directory)


def tree(**branches: Any) -> SimpleNamespace:
    return SimpleNamespace(**branches)


def changed(root: Any, way: Way) -> Any:
    """`root` with the values that a way gives for what it has, such as "model_config.dtype"."""
    for path, value in way.items():
        *parents, leaf = path.split(".")
        if not hasattr(root, path.partition(".")[0]):
            continue
        place = root
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, leaf, value)
    return root
