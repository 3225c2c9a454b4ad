"""Alerts, dashboard and documents use metrics that a node really exports.

The metrics are read from a member of a cluster with a disk, TLS, tenants and shared memory.
"""

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from authorities import pair
from deployed import FOLDER, ROOT, dashboard, panels, read, rules
from fleets import SMALL

from kvstore import Client, ClientConfig, Forbidden, Namespace, opaque_layout
from kvstore.cli.authority import Authority
from kvstore.security.identities import add, new_token, token_line
from node.config import NodeConfig
from node.server import Node
from node.serving.http_server import HttpClient
from node.serving.metrics import metrics_text

DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
TABLES = (ROOT / "docs" / "reference" / "metrics.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Names in documents that begin like a metric: Docker volumes, containers and networks, and a wheel
OTHERS = {"data", "socket", "secrets", "default", "node_1", "llm"}
# The files and dicts with the metrics that adapters add to an engine's
OF_ENGINES = {
    "vllm:kvstore_": ("vllm_metrics.py", "COUNTERS"),
    "vllm:kvstore_tier_": ("vllm_tier.py", "_COUNTERS"),
}
OF_PROMETHEUS = {"job", "cluster", "instance", "alertname", "alertstate"}
OF_VLLM = {"model_name", "engine"}  # labels of its metrics
PROMTOOL = os.environ.get("KVSTORE_PROMTOOL", "")
WORD = r"[a-zA-Z_][a-zA-Z0-9_]*"


@pytest.fixture(scope="module")
def text(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the metrics of the node as text."""
    folder = tmp_path_factory.mktemp("metrics")
    operator, engine = new_token("*"), new_token("team-a")
    add(folder / "identities", token_line("operator", operator, tenant="*", role="admin"))
    add(folder / "identities", token_line("engine", engine, tenant="team-a", role="write"))
    settings = {
        **pair(ours, "node"),
        "tls_ca": str(ours.path),
        "identities": str(folder / "identities"),
        "token": operator,
        "data_dir": str(folder / "data"),
        "disk_nbytes": 64 << 20,
        "shm_socket": str(folder / "node.sock"),
        "cluster": "static:fleet/n1=127.0.0.1:1,n2=127.0.0.1:2",
        "member": "n1",
    }
    node = Node(NodeConfig(**{**SMALL, **settings}))
    node.start()
    try:
        known: dict[str, Any] = {
            "tls_ca": str(ours.path),
            "token": engine,
            "timeout_s": 30.0,
            "connect_timeout_s": 20.0,
        }
        with Client(ClientConfig(f"127.0.0.1:{node.grpc.port}", direct=True, **known)) as client:
            client.put(
                Namespace("llama", opaque_layout(4096), "team-a"), [b"k" * 32], [bytes(4096)]
            )
            with pytest.raises(Forbidden):
                client.flush()
        answer = metrics_text(node.service)(
            {"authorization": f"Bearer {operator}"}, HttpClient("127.0.0.1", ())
        )
        yield answer.body().decode()
    finally:
        node.stop()


@pytest.fixture(scope="module")
def exported(text: str) -> dict[str, set[str]]:
    """Return the labels of each series, by its name."""
    return labels(text)


@pytest.fixture(scope="module")
def families(text: str, exported: dict[str, set[str]]) -> dict[str, tuple[str, set[str]]]:
    """Return (kind, labels) of each metric, by its documented name; a histogram is one metric."""
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    return {
        name: (kind, exported.get(f"{name}_sum" if kind == "histogram" else name, set()))
        for name, kind in kinds.items()
        if not name.endswith("_created")
    }


def labels(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(rf'({WORD})="', rest))
    return found


def asked(expression: str) -> tuple[set[str], set[str]]:
    """Return (metrics, labels) used in an expression."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    metrics = set(re.findall(r"(?<!vllm:)\bkvstore_\w+", plain))
    grouped = re.findall(r"\bby \(([^)]*)\)", plain)
    matched = re.findall(r"\{([^}]*)\}", plain)
    named = {word for part in grouped for word in re.findall(WORD, part)}
    return metrics, named | {
        word for part in matched for word in re.findall(rf"({WORD})\s*(?:=|!)", part)
    }


def test_documented_metrics_exist(exported: dict[str, set[str]]) -> None:
    assert len(exported) > 50
    assert {
        "kvstore_disk_serving",
        "kvstore_tls",
        "kvstore_shm_orphan_pages",
        "kvstore_peers_view_number",
    } <= set(exported)
    assert exported["kvstore_tenant_refused_total"] == {"tenant", "what"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_uses_existing_metrics(exported: dict[str, set[str]], rule: dict[str, Any]) -> None:
    metrics, named = asked(rule["expr"])
    assert metrics <= set(exported)
    assert metrics or rule["alert"] == "KVStoreNodeDown"
    known = OF_PROMETHEUS.union(*(exported[name] for name in metrics))
    assert named <= known
    shown = " ".join(rule["annotations"].values())
    assert set(re.findall(rf"\$labels\.({WORD})", shown)) <= known
    assert set(rule["annotations"]) == {"summary", "remedy", "runbook_url"}
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    grouped = re.match(r"\s*(?:sum|max|min) by \(([^)]*)\)", rule["expr"])
    if grouped:  # other labels are aggregated away
        assert set(re.findall(rf"\$labels\.({WORD})", shown)) <= set(re.findall(WORD, grouped[1]))


def test_alerts_use_the_documented_job() -> None:
    (job,) = re.findall(r"job_name: (\S+)", DOCUMENT)
    assert f'up{{job="{job}"}}' in (FOLDER / "alerts.yaml").read_text()
    assert [some["job_name"] for some in read("prometheus.yaml")["scrape_configs"]] == [job]


def test_each_alert_has_a_rule_test() -> None:
    tried = (FOLDER / "alerts_test.yaml").read_text()
    assert [
        rule["alert"] for rule in rules() if not re.search(rf"\b{rule['alert']}\b", tried)
    ] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's sections, as the site makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_to_sections_of_the_documents() -> None:
    """Runbooks of alerts and links of the dashboard lead to sections of the site."""
    links = [rule["annotations"]["runbook_url"] for rule in rules()]
    links += [
        link["url"].replace("${docs}", "https://docs.example") for link in dashboard()["links"]
    ]
    for link in links:
        page, anchor = re.fullmatch(r"https://docs\.example/(\w+)/#(\S+)", link).groups()  # type: ignore[union-attr]
        assert anchor in anchors(ROOT / "docs" / f"{page}.md"), link


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_has_a_description_and_nodes_link_to_their_console(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > len("By operation and wire")
    of_nodes = any("{{instance}}" in target["legendFormat"] for target in panel["targets"])
    links = [link["url"] for link in panel["fieldConfig"]["defaults"].get("links", [])]
    assert links == (["https://${__field.labels.instance}/console/"] if of_nodes else [])


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_uses_existing_metrics(exported: dict[str, set[str]], panel: dict[str, Any]) -> None:
    assert [target["refId"] for target in panel["targets"]] == list(
        "ABCDEFG"[: len(panel["targets"])]
    )
    for target in panel["targets"]:
        metrics, named = asked(target["expr"])
        assert metrics <= set(exported)
        of_engines = set(re.findall(r"vllm:\w+", target["expr"]))
        assert of_engines <= {f"{name}_total" for name in engine_metrics()}
        assert metrics or of_engines or target["expr"].startswith("count(up{")
        known = OF_PROMETHEUS.union(*(exported[name] for name in metrics))
        known |= OF_VLLM if of_engines else set()
        assert named <= known
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known
        assert target["expr"].count("(") == target["expr"].count(")")


def test_each_metric_is_documented_with_its_kind_and_labels(
    families: dict[str, tuple[str, set[str]]],
) -> None:
    rows = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \|([^|]*)\| \S", TABLES, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {
        name: (kind, set(re.findall(r"`(\w+)`", named))) for name, kind, named in rows
    } == families


def test_metric_names_follow_the_conventions(families: dict[str, tuple[str, set[str]]]) -> None:
    for name, (kind, named) in families.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "histogram" or name.endswith("_seconds")
        assert not named & {"key", "prompt", "hash", "peer"}, name


def counted_by(file: str, table: str) -> set[str]:
    """Return the keys of a dict in an adapter, parsed because only an engine can import it."""
    for node in ast.parse((ROOT / "gpu_agent" / "engines" / file).read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == table
        ):
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no {table}")


def engine_metrics() -> set[str]:
    return {prefix + name for prefix, place in OF_ENGINES.items() for name in counted_by(*place)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_name_existing_metrics(
    exported: dict[str, set[str]], families: dict[str, tuple[str, set[str]]], page: Path
) -> None:
    engines = engine_metrics()
    known = {*exported, *families, *engines, *(f"{name}_total" for name in engines)}
    code = re.findall(r"`+([^`]+)`+", page.read_text())
    named = {
        name
        for part in code
        for name in re.findall(r"(?<![\w/.-])(?:vllm:)?kvstore_[a-z]\w*(?![\w*])", part)
    }
    wrong = {
        name for name in named if name not in known and name.removeprefix("kvstore_") not in OTHERS
    }
    assert wrong == set()


def test_only_counters_are_queried_as_rates() -> None:
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    for expression in expressions:
        for before, name in re.findall(r"(\w+\()?((?:vllm:)?kvstore_\w+)", expression):
            grows = name.endswith(("_total", "_bucket", "_count", "_sum"))
            assert (before in ("rate(", "increase(")) == grows, expression


def test_panels_have_unique_places_and_ids() -> None:
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"\$(\w+)", target["expr"])
    }
    linked = " ".join(link["url"] for link in dashboard()["links"])
    used |= set(re.findall(r"\$\{(\w+)\}", linked))
    assert used | {"datasource"} == variables


@pytest.mark.skipif(not PROMTOOL, reason="make test-monitoring")
def test_promtool_accepts_the_rules_and_each_fires(tmp_path: Path) -> None:
    for name in ("alerts.yaml", "alerts_test.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [PROMTOOL, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not PROMTOOL, reason="make test-monitoring")
@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_promtool_accepts_the_panels(tmp_path: Path, panel: dict[str, Any]) -> None:
    made = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$\w+", "some", target["expr"])}
        for number, target in enumerate(panel["targets"])
    ]
    (tmp_path / "panel.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "panel", "rules": made}]})
    )
    done = subprocess.run(
        [PROMTOOL, "check", "rules", "panel.yaml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
