"""golden/adapters.json: the namespaces in which adapters store the pages of usual engines.

If a digest changes, every page of such an engine is recomputed after an upgrade of kvstore.
"""

import json
from pathlib import Path

import on_others
import on_sglang
import on_vllm
import pytest

# transformers is left out: its namespace covers the configuration's digest, which changes with
# every release.
ADAPTERS = {**on_vllm.ADAPTERS, **on_sglang.ADAPTERS, **on_others.ADAPTERS}
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "adapters.json").read_text())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_usual_engine_has_its_recorded_namespace(adapter: str, tmp_path: Path) -> None:
    space, golden = ADAPTERS[adapter].namespace(tmp_path, {}), GOLDEN[adapter]
    found = {
        "model": space.model,
        "revision": space.revision,
        "salt": space.salt,
        "epoch": space.epoch,
    }
    found["layout"] = space.layout.canonical.decode()
    assert found == {name: golden[name] for name in found}
    assert space.digest.hex() == golden["digest"]
