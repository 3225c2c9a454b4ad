"""The chart in deploy/helm agrees with its schema, its manifests and deploy/monitoring.

These tests need no Helm; `test_rendered.py` has those that do.
"""

import json
from pathlib import Path
from typing import Any

from manifests import CHART, FOLDER, OVERLAYS, ROOT, read, renderer

from kvstore import __version__
from kvstore.cluster.view import REPLICAS_MAX

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else schema


def differences(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> set[str]:
    """Return names that only the values or only the schema has."""
    known = resolved(schema).get("properties")
    if known is None:
        return set()
    assert resolved(schema)["additionalProperties"] is False, f"{path} may have any name"
    optional = {"global", "labels"}  # Helm's own; labels of objects that have none here
    found = {f"{path}{name}" for name in (set(values) ^ set(known)) - optional}
    for name in set(values) & set(known):
        if isinstance(values[name], dict):
            found |= differences(values[name], known[name], f"{path}{name}.")
    return found


def test_schema_knows_each_value_and_no_other() -> None:
    (values,) = read(CHART / "values.yaml")
    assert differences(values, SCHEMA) == set()
    assert SCHEMA["properties"]["cluster"]["properties"]["owners"]["maximum"] == REPLICAS_MAX


def test_manifests_are_rendered_from_this_chart() -> None:
    render = renderer()
    assert tuple(render.RELEASES) == OVERLAYS
    for name in OVERLAYS:
        first = (FOLDER / f"{name}.yaml").read_text().partition("\n")[0]
        assert f"({render.digest()})" in first, "the chart has changed; run `make manifests`"


def test_chart_has_the_version_and_the_files_of_monitoring() -> None:
    (chart,) = read(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    monitoring = ROOT / "deploy" / "monitoring"
    links = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert links == {name: monitoring / name for name in ("alerts.yaml", "dashboard.json")}
    assert all(Path(path).is_symlink() for path in (CHART / "files").iterdir())
