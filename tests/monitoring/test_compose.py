"""The services of docker/compose.monitoring.yaml and Grafana's files, checked without a start."""

import re
from typing import Any

import pytest
from deployed import DOCKER, FOLDER, ROOT, composed, dashboard, panels, read

from node.config import NodeConfig

SERVICES = composed()
WATCHING = ("prometheus", "grafana")
SCHEMA = 39  # the dashboard schema of Grafana 10
PANELS = {"stat", "timeseries"}


def mounts(service: str) -> dict[str, str]:
    """Return the mounts of a service: path in the container -> source."""
    parts = [mount.removesuffix(":ro").partition(":") for mount in SERVICES[service]["volumes"]]
    return {there: here for here, _, there in parts}


# ---- the containers ------------------------------------------------------------------------


def test_monitoring_compose_file_only_adds_services() -> None:
    others = composed("compose.yaml", "compose.cluster.yaml")
    assert set(SERVICES) & set(others) == set()
    extended = SERVICES["scrape"]["extends"]
    assert extended["service"] in composed(extended["file"])
    assert SERVICES["scrape"]["depends_on"].keys() <= composed("compose.cluster.yaml").keys()


def test_only_grafana_is_published_on_loopback() -> None:
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert published == {"scrape": [], "prometheus": [], "grafana": ["127.0.0.1:3000:3000"]}


def test_prometheus_listens_on_the_monitoring_network_only() -> None:
    prometheus, grafana = (SERVICES[name] for name in WATCHING)
    (address,) = [
        word.partition("=")[2] for word in prometheus["command"] if "listen-address" in word
    ]
    (source,) = read("grafana/datasources.yaml")["datasources"]
    assert source["url"] == f"http://{address}"
    assert address.partition(":")[0] in prometheus["networks"]["monitoring"]["aliases"]
    assert prometheus["networks"]["default"] is None
    assert grafana["networks"] == ["monitoring"]
    assert not [
        word
        for word in prometheus["command"]
        if "enable-lifecycle" in word or "enable-admin" in word
    ]


@pytest.mark.parametrize("name", WATCHING)
def test_containers_are_confined_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert re.fullmatch(r"[\w/]+:v?[\d.]+", service["image"]), "the image has no version"
    assert all(here.startswith("../") or here.isidentifier() for here in mounts(name).values())


def test_grafana_requires_the_generated_password() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert not [name for name in environment if "PASSWORD" in name and not name.endswith("__FILE")]
    folder, _, file = environment["GF_SECURITY_ADMIN_PASSWORD__FILE"].rpartition("/")
    assert mounts("grafana")[folder] == mounts("scrape")["/grafana"] == "grafana_known"
    assert file in (DOCKER / "first_scrape.py").read_text()


def test_scraped_ports_are_the_metrics_ports_of_nodes() -> None:
    words = SERVICES["scrape"]["command"].split()
    assert words[3:] == [f"{host}:{NodeConfig.metrics_port}" for host in ("node", "n1", "n2", "n3")]
    for name, file in (("node", "compose.yaml"), ("n1", "compose.cluster.yaml")):
        assert name in composed(file)["setup"]["command"].split()


def test_mounted_files_exist_at_the_configured_paths() -> None:
    for name in WATCHING:
        for here in mounts(name).values():
            assert not here.startswith("../") or (DOCKER / here).resolve().is_file()
    there = mounts("prometheus")
    (file,) = [
        word.partition("=")[2]
        for word in SERVICES["prometheus"]["command"]
        if "config.file" in word
    ]
    assert there[file].endswith("/prometheus.yaml")
    config = read("prometheus.yaml")
    assert [f"/etc/prometheus/{name}" in there for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    configured = [
        *job["tls_config"].values(),
        job["authorization"]["credentials_file"],
        *job["file_sd_configs"][0]["files"],
    ]
    made = (DOCKER / "first_scrape.py").read_text()
    assert all(f'"{name.removeprefix("known/")}"' in made for name in configured)
    assert there["/etc/prometheus/known"] == mounts("scrape")["/prometheus"]


def test_files_copied_by_the_image_are_in_its_build_context() -> None:
    copied = re.findall(r"docker/\w+\.py", (DOCKER / "node.Dockerfile").read_text())
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert "docker/first_scrape.py" in copied
    assert {f"!{name}" for name in copied} <= set(allowed)


# ---- Grafana -------------------------------------------------------------------------------


def test_dashboard_uses_the_provided_data_source() -> None:
    (source,) = read("grafana/datasources.yaml")["datasources"]
    (variable,) = [
        some for some in dashboard()["templating"]["list"] if some["type"] == "datasource"
    ]
    assert (source["type"], source["isDefault"]) == (variable["query"], True)
    asked = {"type": source["type"], "uid": f"${{{variable['name']}}}"}
    for panel in panels():
        assert panel["datasource"] == asked, panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [asked] * len(
            panel["targets"]
        )
    assert (
        source["jsonData"]["timeInterval"] == read("prometheus.yaml")["global"]["scrape_interval"]
    )


def test_dashboard_is_provided_from_its_file() -> None:
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    there = f"{provider['options']['path']}/kvstore.json"
    assert (DOCKER / mounts("grafana")[there]).resolve() == FOLDER / "dashboard.json"
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == there


def test_dashboard_has_a_schema_that_grafana_reads() -> None:
    found = dashboard()
    assert (found["schemaVersion"], found["uid"], found.get("id")) == (SCHEMA, "kvstore", None)
    assert {panel["type"] for panel in panels()} == PANELS
    assert all(isinstance(panel["id"], int) and panel["title"] for panel in found["panels"])
    rows: list[dict[str, Any]] = [panel for panel in found["panels"] if panel["type"] == "row"]
    assert all(row["gridPos"]["w"] == 24 and row["panels"] == [] for row in rows)
