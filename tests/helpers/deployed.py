"""Read the files of `deploy/monitoring` and `docker/compose.monitoring.yaml`."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
DOCKER = ROOT / "docker"


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("alerts.yaml")["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def composed(*names: str) -> dict[str, Any]:
    """Return the services of compose files, with the default of each variable filled in."""
    services: dict[str, Any] = {}
    for name in names or ("compose.monitoring.yaml",):
        text = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", (DOCKER / name).read_text())
        services |= yaml.safe_load(text)["services"]
    return services


def program(name: str) -> Any:
    """Import a program of `docker/`, which is otherwise only in the image."""
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
