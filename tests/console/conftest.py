"""Fixtures for a browser and for nodes whose console it opens.

`make test-console` sets the path of the browser; without it, these tests are skipped.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium
from fleets import Start, small_nodes
from load import Load
from visits import history_of

from node.console.history import EVERY_S
from node.server import Node

CHROMIUM = os.environ.get("KVSTORE_CHROMIUM", "")
HISTORY_SPEEDUP = 60.0  # simulated seconds of the console's history per real second


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CHROMIUM:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="make test-console runs it, in a headless Chromium")
                )


@pytest.fixture
def browser() -> Iterator[Chromium]:
    browser = Chromium(CHROMIUM)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with small_nodes() as start:
        yield start


@pytest.fixture(scope="module")
def pictures() -> Path | None:
    """Return the directory for screenshots; None to take none."""
    named = os.environ.get("KVSTORE_PICTURES", "")
    return Path(named) if named else None


@pytest.fixture(scope="module")
def load(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Yield a loaded 3-member cluster; its one-hour history is sampled 60 times faster."""
    folder = tmp_path_factory.mktemp("busy")
    load = Load(start, folder)
    stopped = threading.Event()
    history = history_of(load.near)
    began = time.monotonic()
    history._wall = lambda: (
        time.time() - HISTORY_SPEEDUP * 60 + HISTORY_SPEEDUP * (time.monotonic() - began)
    )

    def sample() -> None:
        while not stopped.wait(EVERY_S / HISTORY_SPEEDUP):
            if load.sampled:
                history._take(time.monotonic())

    threads = [threading.Thread(target=work) for work in (sample, lambda: load.run(stopped))]
    for thread in threads:
        thread.start()
    yield load
    stopped.set()
    for thread in threads:
        thread.join()
    load.close()


@pytest.fixture
def busy(load: Load) -> Node:
    return load.near
