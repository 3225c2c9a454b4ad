"""The dashboard has the types that Grafana publishes, in the package @grafana/schema.

`make test-monitoring` runs this test where npm is installed, which brings package and compiler.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from deployed import dashboard, panels

pytestmark = pytest.mark.skipif(
    not os.environ.get("KVSTORE_PROMTOOL") or not shutil.which("npm"),
    reason="make test-monitoring, with npm",
)

PACKAGES = ("@grafana/schema@12.4.11", "typescript@5")
# An enum of TypeScript does not accept its text, which JSON has.
PROGRAM = """
import type {{ Dashboard }} from "@grafana/schema";
import type {{ FieldConfig }} from "./node_modules/@grafana/schema/dist/types/{timeseries}";
type Plain<T> = T extends string ? `${{T}}` : T extends number | boolean ? T
  : T extends Array<infer U> ? Array<Plain<U>> : {{ [K in keyof T]: Plain<T[K]> }};
export const dashboard: Plain<Partial<Dashboard>> = {dashboard};
export const fields: Plain<FieldConfig>[] = {fields};
"""
TIMESERIES = "raw/composable/timeseries/panelcfg/x/types.gen"
OPTIONS = ("--strict", "--noEmit", "--skipLibCheck", "--moduleResolution", "node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "package.json").write_text("{}")
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def complaints(folder: Path, content: object) -> str:
    fields = [
        panel["fieldConfig"]["defaults"]["custom"]
        for panel in panels()
        if panel["type"] == "timeseries"
    ]
    text = PROGRAM.format(
        timeseries=TIMESERIES, dashboard=json.dumps(content), fields=json.dumps(fields)
    )
    (folder / "check.ts").write_text(text)
    compiler = ["node_modules/.bin/tsc", *OPTIONS, "check.ts"]
    return subprocess.run(compiler, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_dashboard_has_grafanas_types(folder: Path) -> None:
    assert complaints(folder, dashboard()) == ""


def test_wrong_type_is_found(folder: Path) -> None:
    wrong = dashboard()
    wrong["links"][0]["type"] = "lnk"
    assert '"lnk"' in complaints(folder, wrong)
