"""`kvstore-node` without the packages of its extra names the extra to install."""

import subprocess
import sys

import pytest

from node.main import EXTRA

HIDDEN = """
import sys
from importlib.abc import MetaPathFinder

class Hide(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{fullname!r}}", name=fullname)

sys.meta_path.insert(0, Hide())
sys.argv = ["kvstore-node", *{arguments!r}]
from node.main import main
main()
"""


def node_without(names: tuple[str, ...], *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = HIDDEN.format(names=names, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "names", [EXTRA, *(pytest.param((name,), marks=pytest.mark.long) for name in EXTRA)]
)
def test_node_without_its_extra_names_it_in_one_line(names: tuple[str, ...]) -> None:
    done = node_without(names)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstore-node: the Python package ")
    assert any(name in line for name in names)
    assert "pip install 'kvstore-llm[node]'" in line


def test_node_without_its_extra_prints_version_and_help() -> None:
    assert node_without(EXTRA, "--version").returncode == 0
    assert "--ram-bytes" in node_without(EXTRA, "--help").stdout
