"""kubectl renders the manifests as `manifests.py` does, and the API's schemas allow them.

`make test-kubernetes` runs these tests, which need kubectl and kubernetes-validate, named by
KVSTORE_KUBERNETES_VALIDATE.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import DOCUMENT, EXAMPLES, FOLDER, OVERLAYS, Manifest, Overlay, overlay, read

VALIDATE = os.environ.get("KVSTORE_KUBERNETES_VALIDATE", "")
KUBECTL = os.environ.get("KUBECTL", "kubectl")
VERSIONS = ("1.26", "")  # the oldest that we support, and the newest known
pytestmark = pytest.mark.skipif(not VALIDATE, reason="make test-kubernetes")


def rendered(folder: Path) -> str:
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {
        (some["kind"], re.sub(r"(-settings)-[a-z0-9]+$", r"\1", some["metadata"]["name"])): some
        for some in manifests
    }


def plain(value: Any, images: dict[str, str]) -> Any:
    """Return a manifest without Kustomize's additions: namespaces, images and hashes in names.

    Variables are in a dict by name.
    """
    if isinstance(value, dict):
        found = {
            key: plain(some, images)
            for key, some in value.items()
            if key not in ("namespace", "annotations")
        }
        if "image" in found:
            found["image"] = images.get(found["image"], found["image"])
        if isinstance(found.get("env"), list):
            found["env"] = {entry["name"]: entry for entry in found["env"]}
        return found
    if isinstance(value, list):
        return [plain(some, images) for some in value]
    return (
        re.sub(r"^(kvstore-settings)-[a-z0-9]+$", r"\1", value) if isinstance(value, str) else value
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_renders_the_manifests_of_the_other_tests(name: str) -> None:
    made, ours = (
        by_name(list(yaml.safe_load_all(rendered(FOLDER / "overlays" / name)))),
        overlay(name),
    )
    settings = made.pop(("ConfigMap", "kvstore-settings"))
    assert settings["data"] == ours.settings
    wanted = by_name(ours.manifests)
    assert set(made) == set(wanted)
    for key, manifest in wanted.items():
        assert plain(made[key], {}) == plain(manifest, ours.images), key
    assert {some["metadata"]["namespace"] for some in [settings, *made.values()]} == {"kvstore"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_variables_come_after_those_they_refer_to(name: str) -> None:
    """A variable comes after those that it refers to, as Kubernetes requires for $(NAME)."""
    for manifest in yaml.safe_load_all(rendered(FOLDER / "overlays" / name)):
        for container in (
            manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
        ):
            seen: set[str] = set()
            for entry in container["env"]:
                assert set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) <= seen
                seen.add(entry["name"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "path", [*(FOLDER / "overlays" / name for name in OVERLAYS), FOLDER / "huge-pages", *EXAMPLES]
)
def test_schemas_of_the_api_allow_the_manifests(tmp_path: Path, path: Path, version: str) -> None:
    text = path.read_text() if path.is_file() else rendered(path)
    (tmp_path / "all.yaml").write_text(text)
    words = [
        VALIDATE,
        "--strict",
        *(["-k", version] if version else []),
        str(tmp_path / "all.yaml"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed for resource", done.stdout + done.stderr)
    assert len(passed) == len(list(filter(None, yaml.safe_load_all(text))))


def test_schema_violations_are_found(tmp_path: Path) -> None:
    (manifest,) = read(FOLDER / "base" / "near" / "daemonset.yaml")
    manifest["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(manifest))
    done = subprocess.run(
        [VALIDATE, "--strict", str(tmp_path / "wrong.yaml")], capture_output=True, check=False
    )
    assert done.returncode != 0


def test_kubectl_accepts_the_documented_commands_for_secrets(tmp_path: Path) -> None:
    """kubectl accepts the documented commands for secrets, as a dry run prints a manifest."""
    documented_commands = [
        line for line in DOCUMENT.splitlines() if re.match("    kubectl .*create secret", line)
    ]
    assert len(documented_commands) > 4
    for line in documented_commands:
        words = shlex.split(line.split("|")[0].replace("kubectl", KUBECTL, 1))
        files = [word.rpartition("=")[2] for word in words if word.startswith("--from-file")]
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(f"content of {file}")
        dry = [] if "--dry-run=client" in words else ["--dry-run=client", "-o", "yaml"]
        done = subprocess.run(
            [*words, *dry], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert len(yaml.safe_load(done.stdout)["data"]) == len(files)


def test_tests_cover_all_overlays() -> None:
    assert sorted(path.name for path in (FOLDER / "overlays").iterdir()) == sorted(OVERLAYS)
    assert all(isinstance(overlay(name), Overlay) for name in OVERLAYS)
