"""A Prometheus for tests, started as docker/compose.monitoring.yaml starts it.

Command, configuration and rules are the same; folders differ and the interval is shorter.
"""

import contextlib
import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployed import FOLDER, composed
from node_fleet import HERE

INTERVAL = ("15s", "2s")  # as deployed, and in tests
START_S = 60.0
Labels = dict[str, str]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RealPrometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return the current values of a vector, without NaN."""
        found = [
            (some["metric"], float(some["value"][1]))
            for some in self._ask("query", query=expression)["result"]
        ]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def values(self, label: str, metric: str) -> list[str]:
        """Return a label's values, as Grafana's label_values(metric, label) does."""
        found: list[str] = self._ask(f"label/{label}/values", **{"match[]": metric})
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, path: str, **words: str) -> Any:
        with OPENER.open(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=60
        ) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def started(program: str, folder: Path, engine: str) -> Iterator[RealPrometheus]:
    """Start Prometheus in `folder`, which must contain `known` of docker/first_scrape.py.

    It also scrapes `engine`, the HOST:PORT of an engine's metrics.
    """
    for name in ("prometheus.yaml", "alerts.yaml"):
        (folder / name).write_text((FOLDER / name).read_text())
    config = folder / "prometheus.yaml"
    assert config.read_text().count(INTERVAL[0]) == 2
    engines = f"  - job_name: vllm\n    static_configs: [{{targets: ['{engine}']}}]\n"
    config.write_text(config.read_text().replace(*INTERVAL) + engines)
    address = f"127.0.0.1:{HERE.port(0)}"
    places = (
        ("/etc/prometheus", str(folder)),
        ("=/prometheus", f"={folder}/data"),
        ("prometheus-web:9090", address),
    )
    command = [program, *composed()["prometheus"]["command"]]
    for place in places:
        command = [word.replace(*place) for word in command]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await_ready(process, f"http://{address}", folder / "log")
        yield RealPrometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), OPENER.open(f"{url}/-/ready", timeout=10):
            return
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not start: {log.read_text()}")
