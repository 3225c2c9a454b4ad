"""Tests that every example runs against a node; examples/nodejs has `make test-clients`."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

EXAMPLES = Path(__file__).parent.parent / "examples"


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / name))["main"]


def test_numpy_example_finds_pages_of_another_client(shared_node: NodeProcess) -> None:
    pytest.importorskip("numpy")
    assert main_of("numpy_pages.py")(shared_node.address) == 6


def test_second_toy_engine_skips_prefill(shared_node: NodeProcess) -> None:
    pytest.importorskip("torch")
    assert main_of("toy_engine.py")(shared_node.address) == (100, 4, True)


def test_readme_lists_every_example() -> None:
    named = (EXAMPLES / "README.md").read_text()
    assert [
        path.name
        for path in EXAMPLES.iterdir()
        if path.name not in ("README.md", "__pycache__") and f"({path.name})" not in named
    ] == []
