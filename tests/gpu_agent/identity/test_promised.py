"""golden/adapters.json: under which namespaces adapters store what an engine with usual settings
has. Another digest means that every page of that engine is computed again after an upgrade of
kvstore.
"""

import json
from pathlib import Path

import on_others
import on_sglang
import on_vllm
import pytest

# Of transformers the configuration's digest is part, and what it says changes with every release of
# transformers.
ADAPTERS = {**on_vllm.ADAPTERS, **on_sglang.ADAPTERS, **on_others.ADAPTERS}
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "adapters.json").read_text())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_usual_engine_is_told_apart_by_what_it_was(adapter: str, tmp_path: Path) -> None:
    space, was = ADAPTERS[adapter].namespace(tmp_path, {}), GOLDEN[adapter]
    said = {
        "model": space.model,
        "revision": space.revision,
        "salt": space.salt,
        "epoch": space.epoch,
    }
    said["layout"] = space.layout.canonical.decode()
    assert said == {name: was[name] for name in said}
    assert space.digest.hex() == was["digest"]
