"""A real kube-apiserver admits the manifests and releases of the chart.

`make test-kubernetes` runs these tests if it finds kube-apiserver and etcd.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_apiserver import Cluster, cluster
from manifests import CHART, EXAMPLES, FOLDER, OVERLAYS, read

PROGRAM = os.environ.get("KVSTORE_KUBE_APISERVER", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="make test-kubernetes, with kube-apiserver")

THREE = f"--values={CHART.parent / 'examples' / 'three.yaml'}"
ALL = Path(__file__).with_name("all.yaml")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    programs = (os.environ.get("KUBECTL", "kubectl"), os.environ.get("HELM", "helm"))
    with cluster(PROGRAM, *programs, tmp_path_factory.mktemp("apiserver")) as found:
        for name, level in (("kvstore", "restricted"), ("open", "privileged")):
            found.must("kubectl", "create", "namespace", name)
            label = f"pod-security.kubernetes.io/enforce={level}"
            found.must("kubectl", "label", "namespace", name, label)
        yield found


def pods(name: str) -> dict[str, str]:
    """Return a pod as each workload of a manifest would create it, as YAML by its name."""
    found: dict[str, Any] = {}
    for manifest in read(FOLDER / f"{name}.yaml"):
        template = manifest["spec"].get("template") if "spec" in manifest else None
        if template:
            workload = manifest["metadata"]["name"]
            spec = template["spec"]
            for claim in manifest["spec"].get("volumeClaimTemplates", []):
                source = {"claimName": f"{claim['metadata']['name']}-{workload}-0"}
                volume = {"name": claim["metadata"]["name"], "persistentVolumeClaim": source}
                spec["volumes"].append(volume)
            metadata = {**template["metadata"], "name": f"{workload}-0"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            found[workload] = yaml.safe_dump(pod)
    return found


@pytest.mark.parametrize("path", [*(FOLDER / f"{name}.yaml" for name in OVERLAYS), *EXAMPLES])
def test_server_admits_every_object(api: Cluster, path: Path) -> None:
    namespace = "open" if path.stem == "vllm" else "kvstore"
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict")
    said = api.must("kubectl", *words, "-n", namespace, "-f", str(path))
    assert said.count("serverside-applied") == len(read(path))


def test_restricted_namespace_admits_storage_nodes_and_refuses_near_nodes(api: Cluster) -> None:
    words = ("create", "--dry-run=server", "-f", "-", "-n")
    made = pods("gpu")
    assert set(made) == {"kvstore", "kvstore-near"}
    api.must("kubectl", *words, "kvstore", stdin=made["kvstore"])
    status, said = api.run("kubectl", *words, "kvstore", stdin=made["kvstore-near"])
    assert status != 0
    assert 'violates PodSecurity "restricted' in said
    assert "hostPath" in said
    api.must("kubectl", *words, "open", stdin=made["kvstore-near"])


def test_release_is_installed_upgraded_and_removed(api: Cluster, tmp_path: Path) -> None:
    """A release grows, changes and gets a new version without a refused change."""
    release = ("kvstore", str(CHART), "-n", "kvstore")
    api.must("helm", "install", *release)
    api.must("helm", "upgrade", *release, THREE)
    changes = "ram=32GiB,settings.KVSTORE_NODE_LOG_FORMAT=json,priorityClassName="
    api.must("helm", "upgrade", *release, THREE, "--set", changes)
    newer = tmp_path / "kvstore"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("ersion: 0.1.0", "ersion: 0.2.0"))
    words = ("kvstore", str(newer), "-n", "kvstore", THREE, "--set", changes)
    api.must("helm", "upgrade", *words)
    get = ("get", "statefulset", "kvstore", "-n", "kvstore", "-o", "yaml")
    nodes = yaml.safe_load(api.must("kubectl", *get))
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(":0.2.0")
    assert container["resources"]["limits"]["memory"] == "34Gi"
    (known,) = (
        some for some in nodes["spec"]["template"]["spec"]["volumes"] if some["name"] == "known"
    )
    assert known["projected"]["defaultMode"] == 0o400
    api.must("helm", "uninstall", "kvstore", "-n", "kvstore")
    left = api.must("kubectl", "get", "all,networkpolicy,pdb", "-n", "kvstore", "-o", "name")
    assert left.strip() == ""


def test_release_with_every_value_is_admitted(api: Cluster, tmp_path: Path) -> None:
    """Every part is admitted but those whose kinds an operator brings."""
    values = yaml.safe_load(ALL.read_text())
    for name in ("serviceMonitor", "prometheusRule"):
        values[name]["enabled"] = False
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    words = ("--dry-run=server", "-n", "open", f"--values={tmp_path}/values.yaml")
    api.must("helm", "install", "kvstore", str(CHART), *words)
    said = api.run("helm", "install", "kvstore", str(CHART), "-n", "open", f"--values={ALL}")[1]
    assert 'no matches for kind "ServiceMonitor"' in said
