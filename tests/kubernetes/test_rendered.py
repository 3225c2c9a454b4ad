"""Helm renders the chart, and the API's schemas allow what it renders.

`make test-kubernetes` runs these tests. They need helm, kubectl and kubernetes-validate, named by
HELM, KUBECTL and KVSTORE_KUBERNETES_VALIDATE.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import (
    CHART,
    DOCUMENT,
    EXAMPLES,
    FOLDER,
    OVERLAYS,
    ROOT,
    Manifest,
    Overlay,
    read,
    renderer,
)

from kvstore.config import load
from node.cluster.membership import Membership
from node.config import NodeConfig

VALIDATE = os.environ.get("KVSTORE_KUBERNETES_VALIDATE", "")
KUBECTL = os.environ.get("KUBECTL", "kubectl")
HELM = os.environ.get("HELM", "helm")
VERSIONS = ("1.26", "")  # the oldest that we support, and the newest known
ALL = f"--values={Path(__file__).with_name('all.yaml')}"
OF_OPERATOR = ("ServiceMonitor", "PrometheusRule")  # in no schema of Kubernetes
MONITORING = ROOT / "deploy" / "monitoring"
RENDER = renderer()
pytestmark = pytest.mark.skipif(not VALIDATE, reason="make test-kubernetes")


def helm(*arguments: str) -> list[Manifest]:
    return [some for some in yaml.safe_load_all(RENDER.template(HELM, *arguments)) if some]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [some for some in manifests if some["kind"] == kind]


def ordered(manifests: list[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda some: (some["kind"], some["metadata"]["name"]))


@pytest.fixture(scope="module")
def everything() -> list[Manifest]:
    return helm(ALL)


@pytest.mark.parametrize("name", OVERLAYS)
def test_helm_renders_the_manifests(name: str) -> None:
    ours = read(FOLDER / f"{name}.yaml")
    assert ordered(list(yaml.safe_load_all(RENDER.rendered(HELM, name)))) == ordered(ours)


def test_helm_lint_accepts_the_chart() -> None:
    done = subprocess.run(
        [HELM, "lint", "--strict", str(CHART), ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("replicas=0", "/replicas"),
        ("ram=16G", "/ram"),
        ("nodes=3", "additional properties 'nodes' not allowed"),
        ("cluster.etcd={http://etcd:2379}", "/cluster/etcd/0"),
        ("settings.LOG_LEVEL=DEBUG", "'/settings': additional properties 'LOG_LEVEL'"),
        ("settings.KVSTORE_NODE_RAM_BYTES=1GiB", "is set by ram"),
        ("settings.KVSTORE_NODE_PORT=7000", "is fixed, because services name it"),
        ("settings.KVSTORE_NODE_TOKEN=x", "is a secret, and settings become a ConfigMap"),
        ("settings.KVSTORE_NODE_ETCD_PASSWORD=x", "is a secret, and settings become a ConfigMap"),
        ("near.enabled=true", "near.enabled needs cluster.etcd"),
        ("preStopDrain=true", "preStopDrain needs cluster.etcd"),
        ("cluster.etcdTLS=true", "need cluster.etcd"),
        ("secrets.encryption=key,disk=", "secrets.encryption needs a disk tier"),
        ("replicas=2,cluster.owners=3", "cluster.owners is 3, and there are 2 nodes"),
    ],
)
def test_invalid_value_is_refused_by_name(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RENDER.template(HELM, "--set", value)


def test_fixed_list_names_the_pods_of_any_release() -> None:
    manifests = helm("--set", "replicas=3,nameOverride=cache", "--namespace=prod")
    settings = Overlay("list", manifests, "cache-settings").settings
    (nodes,) = of_kind(manifests, "StatefulSet")
    service = nodes["spec"]["serviceName"]
    assert service in {some["metadata"]["name"] for some in of_kind(manifests, "Service")}
    pods = [f"{nodes['metadata']['name']}-{number}" for number in range(3)]
    variables = {**settings, "KVSTORE_NODE_MEMBER": pods[1]}
    config = load(NodeConfig, "KVSTORE_NODE", {}, variables)
    view = Membership(config.cluster, config.member, config.replicas).view
    assert view is not None
    assert [(member.id, member.address) for member in view.members] == [
        (pod, f"{pod}.{service}.prod.svc:7440") for pod in pods
    ]


def test_nodes_without_a_disk_have_no_claim() -> None:
    (nodes,) = of_kind(helm("--set", "disk="), "StatefulSet")
    assert not {"volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"} & set(nodes["spec"])
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["known"]
    assert "KVSTORE_NODE_DATA_DIR" not in {entry["name"] for entry in container["env"]}


def test_every_value_reaches_its_object(everything: list[Manifest]) -> None:
    (nodes,) = of_kind(everything, "StatefulSet")
    spec, pod = nodes["spec"], nodes["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert set(spec["persistentVolumeClaimRetentionPolicy"].values()) == {"Delete"}
    assert spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    assert pod["priorityClassName"] == "kvstore"
    assert pod["nodeSelector"] == {"disktype": "ssd"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "regcred"}]
    assert container["image"] == "registry.example/other:1.2"
    # 16 GiB, their tables, 512 MiB and two gateways
    assert container["resources"]["limits"]["memory"] == "18Gi"
    program = container["lifecycle"]["preStop"]["exec"]["command"][2]
    compile(program, "preStop", "exec")
    assert '"cluster", "drain"' in program
    settings = Overlay("all", everything).settings
    assert settings["KVSTORE_NODE_SESSIONS_MAX"] == "5000"
    assert settings["KVSTORE_NODE_CLUSTER"] == "etcd://e1.example:2379,e2.example:2379/prod"
    (policy,) = of_kind(everything, "NetworkPolicy")
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
    assert ports == ["grpc", "bulk", 53, 53, 2379, 4318]


def test_zone_of_a_release_replaces_that_of_the_pod() -> None:
    manifests = helm(ALL, "--set", "settings.KVSTORE_NODE_ZONE=east")
    assert Overlay("zone", manifests).settings["KVSTORE_NODE_ZONE"] == "east"
    for kind, name in (("StatefulSet", "kvstore"), ("DaemonSet", "kvstore-near")):
        (found,) = (some for some in of_kind(manifests, kind) if some["metadata"]["name"] == name)
        (container,) = found["spec"]["template"]["spec"]["containers"]
        assert "KVSTORE_NODE_ZONE" not in {entry["name"] for entry in container["env"]}


def test_changed_settings_restart_pods() -> None:
    def annotations(*values: str) -> Any:
        (nodes,) = of_kind(helm(*values), "StatefulSet")
        return nodes["spec"]["template"]["metadata"]["annotations"]

    changed = annotations("--set", "settings.KVSTORE_NODE_LOG_LEVEL=DEBUG")
    assert annotations() == annotations() != changed


def test_monitoring_objects_have_the_files_of_deploy_monitoring(
    everything: list[Manifest],
) -> None:
    def text(name: str) -> str:
        found = (MONITORING / name).read_text()
        return found.replace("https://docs.example", "https://docs.internal/kvstore")

    (rule,) = of_kind(everything, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(text("alerts.yaml"))
    (board,) = (
        some
        for some in of_kind(everything, "ConfigMap")
        if some["metadata"]["name"] == "kvstore-dashboard"
    )
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["kvstore.json"]) == json.loads(text("dashboard.json"))


def test_service_monitor_selects_each_node_once(everything: list[Manifest]) -> None:
    """The monitor finds each kind of node by one service with a port `metrics`."""
    (monitor,) = of_kind(everything, "ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    found = [
        service["spec"]["selector"]["app.kubernetes.io/component"]
        for service in of_kind(everything, "Service")
        if selector.items() <= service["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert sorted(found) == ["near", "storage"]
    assert selector[monitor["spec"]["jobLabel"]] == "kvstore"
    secret = endpoint["authorization"]["credentials"]["name"]
    assert f"create secret generic {secret} " in DOCUMENT


@pytest.mark.parametrize("name", [*OVERLAYS, "all"])
def test_variables_come_after_those_they_refer_to(name: str, everything: list[Manifest]) -> None:
    """A variable comes after those that it refers to, as Kubernetes requires for $(NAME)."""
    for manifest in everything if name == "all" else read(FOLDER / f"{name}.yaml"):
        for container in (
            manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
        ):
            seen: set[str] = set()
            for entry in container.get("env", []):
                assert set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) <= seen
                assert entry["name"] not in seen
                seen.add(entry["name"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*OVERLAYS, "all", *(path.stem for path in EXAMPLES)])
def test_schemas_of_the_api_allow_the_manifests(
    tmp_path: Path, name: str, version: str, everything: list[Manifest]
) -> None:
    files = {path.stem: path for path in (*FOLDER.glob("*.yaml"), *EXAMPLES)}
    manifests = everything if name == "all" else read(files[name])
    checked = [some for some in manifests if some["kind"] not in OF_OPERATOR]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(checked))
    words = [
        VALIDATE,
        "--strict",
        *(["-k", version] if version else []),
        str(tmp_path / "all.yaml"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed for resource", done.stdout + done.stderr)
    assert len(passed) == len(checked)


def test_schema_violations_are_found(tmp_path: Path) -> None:
    (manifest,) = of_kind(read(FOLDER / "gpu.yaml"), "DaemonSet")
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
