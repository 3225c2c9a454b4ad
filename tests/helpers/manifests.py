"""The manifests of `deploy/kubernetes`, which Helm rendered from the chart in `deploy/helm`.

Reading them needs no Helm; `test_rendered.py` renders them again and compares.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "kvstore"
OVERLAYS = ("one", "three", "gpu")
EXAMPLES = sorted((FOLDER / "examples").glob("*.yaml"))
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")
Manifest = dict[str, Any]


class Overlay:
    """The manifests of one rendered file."""

    def __init__(
        self, name: str, manifests: list[Manifest], settings: str = "kvstore-settings"
    ) -> None:
        self.name, self.manifests = name, manifests
        self.settings: dict[str, str] = self.one("ConfigMap", settings)["data"]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [some for some in self.manifests if some["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = (some for some in self.of_kind(kind) if some["metadata"]["name"] == name)
        return found

    @property
    def workloads(self) -> list["Workload"]:
        return [Workload(self, some) for some in self.manifests if some["kind"] in WORKLOADS]


class Workload:
    """A manifest with pods, and the environment variables of its node's container."""

    def __init__(self, overlay: Overlay, manifest: Manifest) -> None:
        self.overlay, self.manifest = overlay, manifest
        self.name: str = manifest["metadata"]["name"]
        self.template: Manifest = manifest["spec"]["template"]
        self.pod: Manifest = self.template["spec"]
        self.container: Manifest = next(some for some in self.pod["containers"])

    @property
    def containers(self) -> list[Manifest]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def variables(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return the container's variables with references resolved.

        `fields`: fields of the pod by path; a label that it lacks is empty.
        """
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            assert source == {"configMapRef": {"name": "kvstore-settings"}}
            found |= self.overlay.settings
        for entry in self.container["env"]:
            found[entry["name"]] = self._value(entry, fields, found)
        return found

    @staticmethod
    def _value(entry: Manifest, fields: Mapping[str, str], before: Mapping[str, str]) -> str:
        if "value" in entry:
            return re.sub(r"\$\((\w+)\)", lambda match: before[match[1]], entry["value"])
        ((kind, reference),) = entry["valueFrom"].items()
        if kind == "secretKeyRef":
            assert reference["optional"], "a secret in a variable must be optional"
            return ""
        return fields.get(reference["fieldPath"], "")

    @property
    def files(self) -> dict[str, tuple[str, str]]:
        """Return (secret, key) of each file that the node's container sees, by path."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        found = {}
        for mount in self.container["volumeMounts"]:
            assert "subPath" not in mount, "a kubelet does not update files mounted with subPath"
            for source in volumes.get(mount["name"], {}).get("projected", {}).get("sources", []):
                for item in source["secret"]["items"]:
                    found[f"{mount['mountPath']}/{item['path']}"] = (
                        source["secret"]["name"],
                        item["key"],
                    )
        return found

    @property
    def needed(self) -> set[tuple[str, str]]:
        """Return (secret, key) of all secrets that the pod needs to start."""
        sources = (
            source["secret"] for volume in self.pod["volumes"] for source in _sources(volume)
        )
        return {
            (secret["name"], item["key"])
            for secret in sources
            if not secret.get("optional")
            for item in secret["items"]
        }


def _sources(volume: Manifest) -> list[Manifest]:
    sources: list[Manifest] = volume.get("projected", {}).get("sources", [])
    return sources


@functools.cache
def overlay(name: str) -> Overlay:
    return Overlay(name, read(FOLDER / f"{name}.yaml"))


def read(path: Path) -> list[Manifest]:
    return [some for some in yaml.safe_load_all(path.read_text()) if some]


def renderer() -> ModuleType:
    """Import deploy/helm/render.py."""
    spec = importlib.util.spec_from_file_location("render", CHART.parent / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def secrets_told(namespace: str) -> Iterator[tuple[str, str, str]]:
    """Yield (secret, key, file) of each documented command that creates a secret."""
    for line in DOCUMENT.splitlines():
        found = re.match(rf"    kubectl -n {namespace} create secret generic (\S+)", line)
        if found and "--dry-run" not in line:
            yield from (
                (found[1], *pair.split("=", 1)) for pair in re.findall(r"--from-file=(\S+)", line)
            )
