"""The version is defined in kvstore/__init__.py, and every other place agrees with it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from image_packages import packages_of_the_image
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvstore
from kvstore import Client, ClientConfig, __version__
from kvstore.config import PROTOCOL_VERSION
from kvstore.tools.node_process import NodeProcess
from node.disk.rows import FORMAT_VERSION

ROOT = Path(__file__).parents[2]


def test_version_has_three_numbers_and_is_found_by_the_build() -> None:
    assert str(Version(__version__)) == __version__
    assert len(Version(__version__).release) == 3
    assert re.findall(
        r'^__version__ = "(.*)"$', Path(kvstore.__file__).read_text(), re.MULTILINE
    ) == [__version__]
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "kvstore/__init__.py"' in project
    assert not re.search(r"^version = ", project, re.MULTILINE)


@pytest.mark.parametrize("module", ["kvstore", "node.main"])
def test_version_option_prints_the_version(module: str) -> None:
    output = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert output.split()[-1] == __version__


def test_status_of_a_node_has_the_version(shared_node: NodeProcess) -> None:
    with Client(
        ClientConfig(address=shared_node.address, connect_timeout_s=20.0, timeout_s=30.0)
    ) as client:
        assert client.node_status().version == __version__


def test_image_has_the_version() -> None:
    assert f"\nARG VERSION={__version__}\n" in (ROOT / "docker" / "node.Dockerfile").read_text()


def test_documents_have_the_version() -> None:
    named = [
        version
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for version in re.findall(r"kvstore_llm-([0-9][^-]*)-py3", path.read_text())
    ]
    assert set(named) <= {__version__}
    first = re.findall(r"^## \[(\S+)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[
        0
    ]
    assert first[0] == __version__
    newest = (
        (ROOT / "CHANGELOG.md")
        .read_text()
        .partition(f"## [{__version__}] ")[2]
        .partition("\n## ")[0]
    )
    assert f"Protocol {PROTOCOL_VERSION}, " in newest
    assert f"Format {FORMAT_VERSION} of the data directory" in newest
    assert first[1] == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", first[1])


def test_all_packages_of_the_image_are_pinned() -> None:
    """All packages of the image are pinned, so that a later build has the same versions."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        canonicalize_name(Requirement(line.partition(" #")[0]).name)
        for line in pins
        if line and line[0] != "#"
    }
    names = packages_of_the_image()
    assert {"grpcio", "rocksdict", "typer", "cffi"} <= names
    assert names <= pinned
