"""Tests that every example runs against a node; examples/nodejs has `make test-clients`."""

import asyncio
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


def test_handlers_of_the_web_service_find_their_pages(shared_node: NodeProcess) -> None:
    main = main_of("fastapi_service.py")
    assert asyncio.run(main(shared_node.address)) == (4, 16, True)


@pytest.mark.filterwarnings("ignore")  # of FastAPI's own packages
def test_web_service_answers_over_http(shared_node: NodeProcess) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    asyncio.run(main_of("fastapi_service.py")(shared_node.address))
    with testclient.TestClient(app_of(shared_node.address)) as http:
        assert http.post("/found", json=list(range(18))).json() == 16
        assert http.post("/load", json=list(range(18))).content == bytes(range(256))


def app_of(address: str) -> Any:
    return runpy.run_path(str(EXAMPLES / "fastapi_service.py"))["app"](address)


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
