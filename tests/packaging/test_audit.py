"""The verdict of `make audit` on pip-audit's output, which is never good for skipped packages."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "docker" / "audit.py"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = {"name": "grpcio", "version": "1.2", "vulns": []}
BAD = {"name": "rich", "version": "3", "vulns": [{"id": "PYSEC-1", "fix_versions": ["4"]}]}
OPEN = {"name": "click", "version": "3", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
SKIPPED = {"name": "xxhash", "skip_reason": "Dependency not found on PyPI and could not be audited"}
OURS = {
    "name": "kvstore-llm",
    "skip_reason": "Dependency not found on PyPI and could not be audited",
}


@pytest.mark.parametrize(
    ("dependencies", "status", "line"),
    [
        ([GOOD], 0, ""),
        ([GOOD, OURS], 0, ""),
        ([GOOD, BAD], 1, "VULNERABLE  rich 3: PYSEC-1, mended in 4"),
        ([OPEN, SKIPPED], 1, "not mended yet"),
        ([GOOD, SKIPPED], 3, "NOT LOOKED UP: 1 of 2"),
        ([SKIPPED] * 9, 3, "and 6 more"),
        ([OURS], 3, "NOT LOOKED UP: 0 of 0"),
    ],
)
def test_verdict_depends_on_vulnerable_and_skipped_packages(
    audit: ModuleType, dependencies: list[Any], status: int, line: str
) -> None:
    found, lines = audit.verdict(json.dumps({"dependencies": dependencies, "fixes": []}))
    assert (found, line in "\n".join(lines)) == (status, True)


@pytest.mark.parametrize("output", ["", "null", "[]", "{}", "Traceback (most recent call last):"])
def test_invalid_output_is_not_a_good_verdict(audit: ModuleType, output: str) -> None:
    status, lines = audit.verdict(output)
    assert status == 3
    assert "NOTHING IS KNOWN" in lines[0]


def test_licences_are_listed_or_reported_as_missing(audit: ModuleType) -> None:
    components = [
        {
            "name": "b",
            "version": "1",
            "licenses": [{"license": {"id": "MIT"}}, {"license": {"name": "MIT License"}}],
        },
        {"name": "a", "version": "2", "licenses": [{"expression": "Apache-2.0 OR MIT"}]},
        {"name": "c", "version": "3"},
    ]
    lines = audit.licences({"components": components})
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "Apache-2.0 OR MIT",
        "MIT, MIT License",
        "NOT SAID",
    ]
