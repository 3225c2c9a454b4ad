"""The manifests agree with the node, its image, each other and docs/kubernetes.md."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import (
    CHART,
    DOCUMENT,
    EXAMPLES,
    FOLDER,
    OVERLAYS,
    ROOT,
    Overlay,
    Workload,
    overlay,
    read,
    secrets_told,
)
from waiting import wait_until

from gpu_agent.options import AgentConfig, Identity
from kvstore import __version__
from kvstore.config import ClientConfig, load, split_address
from kvstore.units import parse_nbytes
from node.cluster.membership import Membership, advertised, check_listens
from node.cluster.registry import OF_ETCD, endpoints_and_name
from node.config import NodeConfig
from node.disk.data_dir import LOCK_WAIT_S
from node.serving.metrics import HEALTH_PATH

DOCKERFILE = (ROOT / "docker" / "node.Dockerfile").read_text()
NAMES = {"StatefulSet": "kvstore-1", "DaemonSet": "kvstore-near-x7k2p"}
NAMESPACE = "kvstore"
HEALTH = ["/opt/kvstore/bin/python", "/opt/kvstore/health.py"]
MIB = 1 << 20


def fields(workload: Workload) -> dict[str, str]:
    """Return the fields of a pod that variables may refer to."""
    name = NAMES[workload.manifest["kind"]]
    return {"metadata.name": name, "metadata.namespace": NAMESPACE, "status.podIP": "10.0.0.5"}


def config_of(workload: Workload) -> NodeConfig:
    return load(NodeConfig, "KVSTORE_NODE", {}, workload.variables(fields(workload)))


def pods() -> Iterator[Any]:
    for name in OVERLAYS:
        yield from (
            pytest.param(some, id=f"{name}-{some.name}") for some in overlay(name).workloads
        )


@pytest.fixture(params=OVERLAYS)
def composed(request: pytest.FixtureRequest) -> Overlay:
    return overlay(request.param)


def known_variables() -> set[str]:
    kinds = [("KVSTORE_NODE_", NodeConfig), ("KVSTORE_", ClientConfig), ("KVSTORE_", Identity)]
    kinds.append(("KVSTORE_AGENT_", AgentConfig))
    names = {
        prefix + field.name.upper() for prefix, kind in kinds for field in dataclasses.fields(kind)
    }
    return {name.replace("NBYTES", "BYTES") for name in names}


# ---- a node --------------------------------------------------------------------------------


def test_tests_cover_every_kind_of_pod() -> None:
    assert [param.id for param in pods()] == [
        "one-kvstore",
        "three-kvstore",
        "gpu-kvstore-near",
        "gpu-kvstore",
    ]


@pytest.mark.parametrize("workload", list(pods()))
def test_variables_of_a_manifest_configure_a_node(workload: Workload) -> None:
    variables = workload.variables(fields(workload))
    ours = {name for name in variables if name.startswith("KVSTORE_")}
    assert ours <= known_variables()
    assert set(variables) - ours <= {"POD_NAMESPACE"}
    assert "args" not in workload.container, "health check and `kvstore` see no arguments"
    assert "command" not in workload.container, "the image's own command starts the node"
    config = config_of(workload)
    assert config.insecurity == ""
    assert not config.insecure
    load(ClientConfig, "KVSTORE", {}, variables)


@pytest.mark.parametrize("workload", list(pods()))
def test_node_finds_its_cluster_and_advertises_its_address(workload: Workload) -> None:
    config = config_of(workload)
    view = Membership(config.cluster, config.member, config.replicas).view
    if workload.overlay.name == "one":
        assert not config.cluster
        return
    name = NAMES[workload.manifest["kind"]]
    assert config.member == name
    if view is None:
        assert endpoints_and_name(config.cluster) == (["etcd.kvstore.svc:2379"], "fleet")
        address = advertised(config.advertise, config.host, config.port, [])
    else:
        address = view.by_id[name].address
    check_listens(config.host, address)
    host, port = split_address(address)
    assert port == config.port
    if workload.manifest["kind"] == "StatefulSet":
        headless = workload.overlay.one("Service", workload.manifest["spec"]["serviceName"])
        assert host == f"{name}.{headless['metadata']['name']}.{NAMESPACE}.svc"
        assert headless["spec"]["clusterIP"] == "None"
        assert headless["spec"]["publishNotReadyAddresses"], (
            "a node must reach itself before it is ready"
        )
    assert config.tls_name
    assert config.tls_ca
    assert config.token_file


def test_fixed_list_has_the_pods_and_no_etcd_settings() -> None:
    (workload,) = overlay("three").workloads
    config = config_of(workload)
    assert [name for name, default in OF_ETCD if getattr(config, name) != default] == []
    view = Membership(config.cluster, config.member, config.replicas).view
    assert view is not None
    pods = [f"kvstore-{number}" for number in range(workload.manifest["spec"]["replicas"])]
    assert [(member.id, member.address) for member in view.members] == [
        (pod, f"{pod}.kvstore-nodes.{NAMESPACE}.svc:7440") for pod in pods
    ]


@pytest.mark.parametrize("workload", list(pods()))
def test_ports_match_the_image_and_the_services(workload: Workload) -> None:
    config = config_of(workload)
    named = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
    assert named == {"grpc": config.port, "bulk": config.bulk_port, "metrics": config.metrics_port}
    (exposed,) = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)
    assert sorted(named.values()) == sorted(map(int, exposed.split()))
    labels = workload.template["metadata"]["labels"]
    for service in workload.overlay.of_kind("Service"):
        if service["spec"]["selector"].items() <= labels.items():
            for port in service["spec"]["ports"]:
                assert port["port"] == named[port["targetPort"]], (
                    "clients connect to the node's own port number"
                )


@pytest.mark.parametrize("workload", list(pods()))
def test_probes_run_the_health_check_with_enough_time(workload: Workload) -> None:
    config = config_of(workload)
    assert config.tls_client_ca, "a kubelet, which has no certificate, could probe by HTTP"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert workload.container[kind]["exec"] == {"command": HEALTH}
    assert f'"GET", "{HEALTH_PATH}"' in (ROOT / "docker" / "health.py").read_text()
    # The start is slow where a hypervisor backs memory only when it is touched
    touched_s = config.ram_nbytes / (1 << 30) / 2 * 20
    startup = workload.container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= touched_s
    liveness = workload.container["livenessProbe"]
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 60, (
        "a restart, which loses the pages in RAM, comes too soon"
    )


@pytest.mark.parametrize("workload", list(pods()))
def test_grace_period_covers_drain_and_flush(workload: Workload) -> None:
    config = config_of(workload)
    wanted = config.drain_s + (config.flush_s + LOCK_WAIT_S if config.data_dir else 0.0)
    assert workload.pod["terminationGracePeriodSeconds"] >= wanted + 10


def nbytes(quantity: str) -> int:
    """Return the bytes of a Kubernetes quantity such as 17Gi or 4672Mi."""
    assert re.fullmatch(r"\d+[KMGT]i", quantity), quantity
    return parse_nbytes(quantity + "B")


@pytest.mark.parametrize("workload", list(pods()))
def test_memory_and_volume_fit_the_sizes(workload: Workload) -> None:
    config, resources = config_of(workload), workload.container["resources"]
    gateways = config.grpc_processes * config.grpc_memory_nbytes
    assert (
        nbytes(resources["limits"]["memory"]) >= config.ram_nbytes * 65 // 64 + 512 * MIB + gateways
    )
    assert resources["requests"]["memory"] == resources["limits"]["memory"], (
        "a node touches all of its memory at the start"
    )
    assert "cpu" not in resources["limits"]
    for claim in workload.manifest["spec"].get("volumeClaimTemplates", []):
        assert (
            nbytes(claim["spec"]["resources"]["requests"]["storage"]) >= config.disk_nbytes * 1.05
        )


# ---- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", list(pods()))
def test_files_of_a_node_are_in_secrets_of_its_pod(workload: Workload) -> None:
    config, variables = config_of(workload), workload.variables(fields(workload))
    read_by_node = [
        config.tls_cert,
        config.tls_key,
        config.tls_ca,
        config.tls_client_ca,
        config.identities,
    ]
    assert set(filter(None, [*read_by_node, config.token_file])) <= set(workload.files)
    of_operator = ("KVSTORE_TLS_CA", "KVSTORE_TLS_CERT", "KVSTORE_TLS_KEY", "KVSTORE_TOKEN_FILE")
    by_operator = {variables[name] for name in of_operator}
    if workload.manifest["kind"] == "StatefulSet":
        assert by_operator <= set(workload.files)
    else:
        assert "operator" not in {key for _, key in workload.files.values()}, (
            "hosts of other pods get the operator's token"
        )
    (volume,) = (some for some in workload.pod["volumes"] if some["name"] == "known")
    assert volume["projected"]["defaultMode"] == 0o400, "other users could read keys and tokens"
    if config.token_file and workload.manifest["kind"] == "DaemonSet":
        assert workload.files[config.token_file] in workload.needed


@pytest.mark.parametrize("workload", list(pods()))
def test_written_paths_are_on_volumes(workload: Workload) -> None:
    config = config_of(workload)
    writable = {
        mount["mountPath"]
        for mount in workload.container["volumeMounts"]
        if not mount.get("readOnly")
    }
    wanted = set()
    if config.data_dir:
        wanted.add(str(Path(config.data_dir).parent))
    if config.shm_socket != "none":
        wanted.add(str(Path(config.shm_socket).parent))
    assert writable == wanted, "writable volumes differ from the paths that a node writes"


def test_document_makes_the_secrets_of_the_manifests() -> None:
    documented = {
        (secret, key)
        for secret, key, _ in secrets_told(NAMESPACE)
        if secret != "kvstore-prometheus"  # not of a pod of ours: the ServiceMonitor names it
    }
    wanted = {
        pair
        for name in OVERLAYS
        for some in overlay(name).workloads
        for pair in some.files.values()
    }
    assert documented == wanted


def test_document_makes_the_secret_of_an_engine() -> None:
    (engine,) = read(FOLDER / "examples" / "vllm.yaml")
    pod = engine["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert set(variables) <= known_variables()
    mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    documented = [
        (key, file) for secret, key, file in secrets_told("default") if secret == "kvstore-engine"
    ]
    assert volumes["kvstore-known"]["secret"] == {
        "secretName": "kvstore-engine",
        "defaultMode": 0o400,
    }
    at = mounted["kvstore-known"]["mountPath"]
    files = ("KVSTORE_TLS_CA", "KVSTORE_TLS_CERT", "KVSTORE_TLS_KEY", "KVSTORE_TOKEN_FILE")
    assert {variables[name] for name in files} == {f"{at}/{key}" for key, _ in documented}
    (near,) = (some for some in overlay("gpu").workloads if some.name == "kvstore-near")
    (socket,) = (some for some in near.pod["volumes"] if some["name"] == "socket")
    assert volumes["kvstore-socket"]["hostPath"] == socket["hostPath"]
    assert mounted["kvstore-socket"]["mountPath"] == variables["KVSTORE_SHM_DIR"]
    services = {some["metadata"]["name"] for some in overlay("gpu").of_kind("Service")}
    config = load(ClientConfig, "KVSTORE", {}, variables)
    assert [split_address(address) for address in config.addresses] == [
        (f"{name}.{NAMESPACE}.svc", 7440)
        for name in ("kvstore-near", "kvstore")
        if name in services
    ]
    assert config.tls_name == overlay("gpu").settings["KVSTORE_NODE_TLS_NAME"]


# ---- confinement ---------------------------------------------------------------------------


@pytest.mark.parametrize("workload", list(pods()))
def test_pod_is_confined(workload: Workload) -> None:
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    security = workload.pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert security["fsGroup"] == int(group), "the node could not read its secrets"
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert workload.pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(workload.pod)
    for container in workload.containers:
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in own
        if container is workload.container:
            assert set(own) == {
                "readOnlyRootFilesystem",
                "allowPrivilegeEscalation",
                "capabilities",
            }
            assert set(own["capabilities"]) == {"drop"}
        else:
            assert own["capabilities"].get("add") == ["CHOWN"]


def test_storage_nodes_fit_a_restricted_namespace(composed: Overlay) -> None:
    (storage,) = (some for some in composed.workloads if some.manifest["kind"] == "StatefulSet")
    assert not storage.pod.get("initContainers")
    assert [set(volume) - {"name"} for volume in storage.pod["volumes"]] == [{"projected"}]


@pytest.mark.parametrize("workload", list(pods()))
def test_commands_use_paths_of_the_image(workload: Workload) -> None:
    for container in workload.containers:
        if command := container.get("command"):
            assert command[:2] == ["/opt/kvstore/bin/python", "-c"]
            compile(command[2], "command", "exec")
    assert "python3 -m venv --without-pip /opt/kvstore" in DOCKERFILE
    assert "install -m 0644 first_start.py first_scrape.py health.py /opt/kvstore " in DOCKERFILE


def test_pod_of_huge_pages_ends_on_sigterm() -> None:
    """The pod of huge pages ends on SIGTERM.

    The kernel does not deliver a signal without handler to process 1 of a container. A process that
    ignores the signal stands in for it here.
    """
    template = (CHART / "templates" / "huge-pages.yaml").read_text()
    (program,) = re.findall(r'- "(import signal; .+)"$', template, re.MULTILINE)
    begin = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", begin, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:

        def has_ended() -> bool:
            process.terminate()
            return process.poll() is not None

        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            wait_until(has_ended)
        finally:
            process.kill()
    assert process.returncode == 0


# ---- services and policies -----------------------------------------------------------------


def test_selectors_match_their_pods(composed: Overlay) -> None:
    labels = {some.name: some.template["metadata"]["labels"] for some in composed.workloads}
    for workload in composed.workloads:
        selector = workload.manifest["spec"]["selector"]["matchLabels"]
        assert [name for name, some in labels.items() if selector.items() <= some.items()] == [
            workload.name
        ]
        for constraint in workload.pod.get("topologySpreadConstraints", []):
            assert constraint["labelSelector"]["matchLabels"] == selector
    selected = {"kvstore-nodes": "kvstore", "kvstore": "kvstore", "kvstore-near": "kvstore-near"}
    for service in composed.of_kind("Service"):
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        assert [some for some in labels if selector.items() <= labels[some].items()] == [
            selected[name]
        ]
    (budget,) = composed.of_kind("PodDisruptionBudget")
    storage = composed.one("StatefulSet", "kvstore")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": storage["spec"]["selector"]}
    (policy,) = composed.of_kind("NetworkPolicy")
    assert all(
        policy["spec"]["podSelector"]["matchLabels"].items() <= some.items()
        for some in labels.values()
    )


def test_network_policy_opens_ports_to_engines_members_and_prometheus(
    composed: Overlay,
) -> None:
    (policy,) = composed.of_kind("NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    pages, metrics = policy["spec"]["ingress"]
    assert [port["port"] for port in pages["ports"]] == ["grpc", "bulk"]
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]
    for source in pages["from"]:
        assert "podSelector" in source, "all pods of a namespace are let in"
    (engine,) = read(FOLDER / "examples" / "vllm.yaml")
    label = {"kvstore-client": "true"}
    assert label.items() <= engine["spec"]["template"]["metadata"]["labels"].items()
    assert {"podSelector": {"matchLabels": label}} in pages["from"]
    assert "kvstore-clients=true" in DOCUMENT


def test_network_policy_lets_nodes_reach_members_names_and_etcd(composed: Overlay) -> None:
    (policy,) = composed.of_kind("NetworkPolicy")
    members, names, *others = policy["spec"]["egress"]
    nodes = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvstore"}}}
    assert members["to"] == [nodes]
    assert nodes in policy["spec"]["ingress"][0]["from"]
    assert [port["port"] for port in members["ports"]] == ["grpc", "bulk"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    cluster = composed.settings.get("KVSTORE_NODE_CLUSTER", "")
    etcd = endpoints_and_name(cluster)[0] if cluster.startswith("etcd://") else []
    assert [port["port"] for rule in others for port in rule["ports"]] == [
        split_address(endpoint)[1] for endpoint in etcd
    ]


def test_variables_of_services_are_no_settings(
    composed: Overlay,
) -> None:
    """The variables that Kubernetes makes of services are no settings of a node.

    A service `kvstore-node` would set KVSTORE_NODE_PORT=tcp://... in every pod of its namespace.
    """
    made = set()
    for service in composed.of_kind("Service"):
        stem = service["metadata"]["name"].upper().replace("-", "_")
        made |= {
            f"{stem}_{rest}"
            for rest in ("PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_BULK")
        }
    assert not made & known_variables()
    assert all(some.pod["enableServiceLinks"] is False for some in composed.workloads)


def test_pods_have_the_image_of_this_version(composed: Overlay) -> None:
    images = {some["image"] for workload in composed.workloads for some in workload.containers}
    assert images == {f"registry.example/kvstore-node:{__version__}"}


def test_example_etcd_has_the_address_of_the_overlays() -> None:
    example = {some["kind"]: some for some in read(FOLDER / "examples" / "etcd.yaml")}
    service, etcd = example["Service"], example["StatefulSet"]
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    cluster = overlay("gpu").settings["KVSTORE_NODE_CLUSTER"]
    assert cluster == f"etcd://{name}:{service['spec']['ports'][0]['port']}/fleet"
    assert (
        f"--advertise-client-urls=http://{name}:2379"
        in etcd["spec"]["template"]["spec"]["containers"][0]["command"]
    )
    compose = (ROOT / "docker" / "compose.cluster.yaml").read_text()
    assert etcd["spec"]["template"]["spec"]["containers"][0]["image"] in compose


def test_every_file_is_rendered_or_an_example() -> None:
    rendered = {FOLDER / f"{name}.yaml" for name in OVERLAYS}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == {*EXAMPLES, *rendered}


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_every_pod_has_a_security_context(path: Path) -> None:
    """Every pod sets its security context, also in examples, which users copy."""
    for document in read(path):
        pod = (document.get("spec") or {}).get("template", {}).get("spec", {})
        containers = [*pod.get("initContainers", ()), *pod.get("containers", ())]
        whole = [container for container in containers if "image" in container]
        if whole:
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in whole:
            context = container["securityContext"]
            assert context.get("privileged") or context["allowPrivilegeEscalation"] is False, (
                container["name"]
            )
            assert context.get("privileged") or context["capabilities"]["drop"] == ["ALL"], (
                container["name"]
            )
