"""What `deploy/kubernetes` says, composed as Kustomize composes it, as far as we use that.

It takes no `kubectl`: `test_rendered.py` compares both.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("one", "three", "gpu")
EXAMPLES = sorted((FOLDER / "examples").glob("*.yaml"))
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")
Manifest = dict[str, Any]


class Overlay:
    """Its manifests, with what stands in its bases patched."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.manifests, self.settings, self.images = _composed(folder)

    def of_kind(self, kind: str) -> list[Manifest]:
        return [some for some in self.manifests if some["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = (some for some in self.of_kind(kind) if some["metadata"]["name"] == name)
        return found

    @property
    def workloads(self) -> list["Workload"]:
        return [Workload(self, some) for some in self.manifests if some["kind"] in WORKLOADS]


class Workload:
    """Pods of a kind.

    Variables as the node's container has them, with what Kubernetes fills in filled in.
    """

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
        """`fields`: of the pod, by their path; a label that it lacks is empty."""
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
            assert reference["optional"], "a secret that few have"
            return ""
        return fields.get(reference["fieldPath"], "")

    @property
    def files(self) -> dict[str, tuple[str, str]]:
        """(secret, key) of each file that the node's container sees, by its path."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        found = {}
        for mount in self.container["volumeMounts"]:
            assert "subPath" not in mount, "a kubelet does not replace what lies there"
            for source in volumes.get(mount["name"], {}).get("projected", {}).get("sources", []):
                for item in source["secret"]["items"]:
                    found[f"{mount['mountPath']}/{item['path']}"] = (
                        source["secret"]["name"],
                        item["key"],
                    )
        return found

    @property
    def needed(self) -> set[tuple[str, str]]:
        """Those of secrets without which the pod does not start."""
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
    return Overlay(FOLDER / "overlays" / name)


def read(path: Path) -> list[Manifest]:
    return [some for some in yaml.safe_load_all(path.read_text()) if some]


def _composed(folder: Path) -> tuple[list[Manifest], dict[str, str], dict[str, str]]:
    """(manifests, what is in kvstore-settings, the image of each name)."""
    (kustomization,) = read(folder / "kustomization.yaml")
    manifests: list[Manifest] = []
    settings: dict[str, str] = {}
    for base in kustomization.get("bases", []):
        below, known, _ = _composed((folder / base).resolve())
        manifests += below
        settings |= known
    manifests += [
        some for name in kustomization.get("resources", []) for some in read(folder / name)
    ]
    for name in kustomization.get("patchesStrategicMerge", []):
        for patch in read(folder / name):
            place = next(number for number, some in enumerate(manifests) if _is(some, patch))
            manifests[place] = merged(manifests[place], patch)
    for generator in kustomization.get("configMapGenerator", []):
        assert generator["name"] == "kvstore-settings"
        settings |= dict(literal.split("=", 1) for literal in generator["literals"])
    images = {
        some["name"]: f"{some['newName']}:{some['newTag']}"
        for some in kustomization.get("images", [])
    }
    return manifests, settings, images


def _is(manifest: Manifest, patch: Manifest) -> bool:
    return bool(
        manifest["kind"] == patch["kind"]
        and manifest["metadata"]["name"] == patch["metadata"]["name"]
    )


def merged(below: Any, patch: Any, field: str = "") -> Any:
    """Containers and variables are found again by their names; any other list is replaced."""
    if isinstance(below, dict) and isinstance(patch, dict):
        return {
            **below,
            **{key: merged(below.get(key), value, key) for key, value in patch.items()},
        }
    if field in ("containers", "initContainers", "env") and below:
        patches = {some["name"]: some for some in patch}
        kept = [merged(some, patches.pop(some["name"], {})) for some in below]
        # What is new comes first: variables that others are made of stand before these.
        return [*patches.values(), *kept]
    return patch


def secrets_told(namespace: str) -> Iterator[tuple[str, str, str]]:
    """(secret, key, file) of each command of the document that makes a secret in a namespace."""
    for line in DOCUMENT.splitlines():
        found = re.match(rf"    kubectl -n {namespace} create secret generic (\S+)", line)
        if found and "--dry-run" not in line:
            yield from (
                (found[1], *pair.split("=", 1)) for pair in re.findall(r"--from-file=(\S+)", line)
            )
