"""Check that a Grafana requires its password, has the dashboard and queries Prometheus.

tests/docker/monitoring.sh runs it:

    python3 tests/docker/grafana.py http://127.0.0.1:3000 PASSWORD_FILE dashboard.json

Exit status 1 and a line on stderr if not.
"""

import base64
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_S = 120.0
SOURCE = "kvstore-prometheus"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(url: str, password_file: str, dashboard_file: str) -> str:
    """Return what is wrong, or an empty string."""
    password = Path(password_file).read_text().strip()
    expected = json.loads(Path(dashboard_file).read_text())
    _await(lambda: _ask(url, "/api/health")["database"] == "ok")
    for stranger in ("", "admin:admin"):
        if (status := _status(url, f"/api/dashboards/uid/{expected['uid']}", stranger)) != 401:
            return f"a stranger ({stranger or 'anonymous'}) got {status}"
    who = f"admin:{password}"
    _await(lambda: _status(url, f"/api/dashboards/uid/{expected['uid']}", who) == 200)
    found = _ask(url, f"/api/dashboards/uid/{expected['uid']}", who)
    titles = [
        [panel.get("title") for panel in some["panels"]] for some in (found["dashboard"], expected)
    ]
    if titles[0] != titles[1] or not found["meta"]["provisioned"]:
        return f"the dashboard has panels {titles[0]}, provisioned: {found['meta']['provisioned']}"
    query = urllib.parse.urlencode({"query": 'count(up{job="kvstore"})'})
    answer = _ask(url, f"/api/datasources/proxy/uid/{SOURCE}/api/v1/query?{query}", who)
    if [float(some["value"][1]) for some in answer["data"]["result"]] != [3.0]:
        return f"through {SOURCE} Prometheus answers {answer}"
    return ""


def _await(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if condition():
                return
        except (OSError, KeyError):
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"Grafana is not ready after {START_S:g} s")
        time.sleep(0.5)


def _ask(url: str, path: str, who: str = "") -> Any:
    """Return the JSON reply to a request by `who`, given as user:password.

    Raises OSError.
    """
    credentials = (
        {"Authorization": "Basic " + base64.b64encode(who.encode()).decode()} if who else {}
    )
    with OPENER.open(urllib.request.Request(url + path, headers=credentials), timeout=20) as answer:
        return json.load(answer)


def _status(url: str, path: str, who: str) -> int:
    try:
        _ask(url, path, who)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


if __name__ == "__main__":
    wrong = main(*sys.argv[1:])
    if wrong:
        print(f"grafana: {wrong}", file=sys.stderr)
    sys.exit(bool(wrong))
