"""A real Prometheus scrapes three members under traffic, and evaluates the dashboard's queries and
the alert rules.
"""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from deployed import dashboard, panels, program, rules
from engine_metrics import PER_S, engine
from monitored import Monitored
from real_prometheus import RealPrometheus, started
from waiting import wait_until

PROGRAM = os.environ.get("KVSTORE_PROMETHEUS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="make test-monitoring")

JOB = "kvstore"
ANSWERS_S = 90.0
WINDOWS = {
    "__interval": "15s",
    "__rate_interval": "1m",
    "__range": "5m",
}  # values that Grafana inserts
QUIET = {
    "Nodes that do not answer A": "all answer, until one is killed below",
    "Unreachable members A": "likewise",
    "Disks stopped A": "no disk fails",
    "Waiting now A": "calls wait for milliseconds only",
    "Waiting now B": "likewise",
    "Disk write queue A": "likewise",
    "Replication queue A": "likewise",
    "Pages in RAM that can not be evicted B": "pages are held for as long as they are sent",
    "Pages in RAM that can not be evicted C": "no client dies",
    "Pages refused or damaged by the disk A": "the disk is fast enough, or not",
    "Pages refused or damaged by the disk B": "nothing damages pages",
    "Pages replicated, fetched, dropped C": "all members are up, though one may be full at times",
    "Pages replicated, fetched, dropped D": "likewise",
    "Gateways serving, and ends per hour B": "no client floods them",
}
"""Queries whose result may be 0 here, and why. All others must be positive."""
MAY_BE_PENDING = {
    "KVStoreTenantAtQuota": "team-b asks for more pins than it has",
    "KVStoreRefusesStrangers": "team-b flushes, which is refused",
    "KVStoreDiskTooSlow": "the disk queue has only 2 MiB",
    "KVStoreReplicasDropped": "so has the replication queue, and the members are full",
}


def targets(chosen: dict[str, str]) -> dict[str, str]:
    """Return the queries by the title of their panel and their letter."""
    found = [(panel["title"], target) for panel in panels() for target in panel["targets"]]
    return {
        f"{title} {target['refId']}": substituted(target["expr"], chosen) for title, target in found
    }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    nodes = Monitored(tmp_path_factory.mktemp("nodes"))
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def prometheus(
    nodes: Monitored, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealPrometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "known").mkdir()
    (folder / "grafana").mkdir()
    arguments = [
        str(nodes.known),
        str(folder / "known"),
        str(folder / "grafana"),
        *nodes.scraped,
        "elsewhere:7442",
    ]
    assert program("first_scrape").main(arguments) == 0
    with engine() as address, started(PROGRAM, folder, address) as prometheus:
        wait_until(lambda: prometheus.query(f'sum(up{{job="{JOB}"}})') == [({}, 3.0)])
        yield prometheus


@pytest.fixture(scope="module")
def chosen(prometheus: RealPrometheus) -> dict[str, str]:
    """Return the initial values of the dashboard's variables."""
    chosen = dict(WINDOWS)
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            values = offered(prometheus, variable["query"]["query"], chosen)
            assert values or variable["includeAll"], variable
            chosen[variable["name"]] = variable["allValue"] if variable["includeAll"] else values[0]
        elif variable["type"] == "textbox":
            chosen[variable["name"]] = variable["query"]
    return chosen


def offered(prometheus: RealPrometheus, query: str, chosen: dict[str, str]) -> list[str]:
    """Return the values that Grafana offers for a variable."""
    ((metric, label),) = re.findall(r"^label_values\((.+), (\w+)\)$", query)
    return prometheus.values(label, substituted(metric, chosen))


def substituted(expression: str, chosen: dict[str, str]) -> str:
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: chosen[found[1] or found[2]], expression)


def answered(prometheus: RealPrometheus, name: str, expression: str) -> bool:
    """Return whether a query has a result, which must be positive unless it is in QUIET."""
    return any(value > 0 or name in QUIET for _, value in prometheus.query(expression))


def test_each_panel_query_shows_the_traffic(
    nodes: Monitored, prometheus: RealPrometheus, chosen: dict[str, str]
) -> None:
    asked = targets(chosen)
    assert set(QUIET) <= set(asked)
    nodes.fill()

    silent, end = asked, time.monotonic() + ANSWERS_S
    while silent and time.monotonic() < end:
        nodes.traffic()
        silent = {
            name: expression
            for name, expression in asked.items()
            if not answered(prometheus, name, expression)
        }
    assert silent == {}


def test_missing_metric_is_detected(prometheus: RealPrometheus) -> None:
    for wrong in (
        'kvstore_ram_page{job="kvstore"}',
        'kvstore_ram_pages{job="other"}',
        "vector(0) / 0",
    ):
        assert not answered(prometheus, next(iter(QUIET)), wrong)


def test_panels_have_a_line_for_each_label_value(
    nodes: Monitored, prometheus: RealPrometheus, chosen: dict[str, str]
) -> None:
    asked = targets(chosen)
    expected = {
        ("Hit rate by model A", "model"): {"llama"},
        ("Requests per second A", "wire"): {"bulk", "grpc", "shm"},
        ("Gets until their pages are in RAM A", "tier"): {"ram", "disk", "peer"},
        ("Prefill seconds saved per second A", "model_name"): {"llama"},
        ("RAM of tenants A", "tenant"): {"default", "team-b"},
        ("View number by member A", "instance"): set(nodes.scraped),
    }

    def all_lines_exist() -> bool:
        nodes.traffic()
        found = {(name, label): prometheus.query(asked[name]) for name, label in expected}
        return expected == {
            at: {labels[at[1]] for labels, _ in lines} for at, lines in found.items()
        }

    wait_until(all_lines_exist)


def test_chosen_tenant_model_and_cluster_limit_the_panels(
    prometheus: RealPrometheus, chosen: dict[str, str]
) -> None:
    limited = {**chosen, "tenant": "team-b", "model": "llama", "cluster": "compose"}
    for variable in dashboard()["templating"]["list"]:
        if variable["name"] in ("tenant", "model", "cluster"):
            found_values = offered(prometheus, variable["query"]["query"], chosen)
            assert limited[variable["name"]] in found_values
    found = targets(limited)
    lines = prometheus.query(found["RAM of tenants A"])
    assert {labels["tenant"] for labels, _ in lines} == {"team-b"}
    assert answered(prometheus, "", found["Hit rate by model A"])
    for variable, title in (("model", "Hit rate by model A"), ("cluster", "RAM in use A")):
        other = targets({**limited, variable: "other"})
        assert not answered(prometheus, next(iter(QUIET)), other[title])


def test_saved_seconds_are_those_that_engines_tell(
    prometheus: RealPrometheus, chosen: dict[str, str]
) -> None:
    found = targets(chosen)
    saved = found["Prefill seconds saved per second A"]
    tokens = found["Prompt tokens not computed again A"]
    ((_, rate),) = prometheus.query(f"({tokens}) / ({saved})")
    assert rate == pytest.approx(PER_S["hit_tokens"] / PER_S["prefill_seconds_saved"])


def test_all_rules_are_healthy_and_none_fires(prometheus: RealPrometheus) -> None:
    def pending() -> set[str]:
        """Return pending alerts; one of a late scrape on a busy machine ends by itself."""
        return {rule["name"] for rule in prometheus.rules() if rule["state"] == "pending"}

    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()))
    wait_until(lambda: pending() <= set(MAY_BE_PENDING))
    found = prometheus.rules()
    assert [rule["name"] for rule in found] == [rule["alert"] for rule in rules()]
    assert [rule["name"] for rule in found if rule["state"] == "firing"] == []


def test_killed_node_is_shown(
    nodes: Monitored, prometheus: RealPrometheus, chosen: dict[str, str]
) -> None:
    nodes.nodes["n3"].kill()
    asked = targets(chosen)
    wait_until(lambda: prometheus.query(asked["Nodes that do not answer A"]) == [({}, 1.0)])

    def state(name: str) -> Any:
        return next(rule["state"] for rule in prometheus.rules() if rule["name"] == name)

    wait_until(lambda: state("KVStoreNodeDown") == "pending")

    def fails() -> bool:
        nodes.look()
        return ({"member": "n3"}, 2.0) in prometheus.query(asked["Unreachable members A"])

    wait_until(fails)
