"""A browser, and nodes for it to look at.

`make test-console` says where the browser is; without it nothing runs.
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

from node.console.history import EVERY_S, History
from node.server import Node

CHROMIUM = os.environ.get("KVSTORE_CHROMIUM", "")
SPED_UP = 60.0  # of the last hour: so many seconds are told as one that passes here


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
    """Where they go, if they are wanted."""
    named = os.environ.get("KVSTORE_PICTURES", "")
    return Path(named) if named else None


@pytest.fixture(scope="module")
def load(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """One of three members under load, whose last hour is made of as many samples in a minute."""
    folder = tmp_path_factory.mktemp("busy")
    load = Load(start, folder)
    stopped = threading.Event()
    history = history_of(load.near)
    began = time.monotonic()
    history._wall = lambda: time.time() - SPED_UP * 60 + SPED_UP * (time.monotonic() - began)

    def sample() -> None:
        while not stopped.wait(EVERY_S / SPED_UP):
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


def history_of(node: Node) -> History:
    (history,) = [
        one
        for look in node._watch._looks
        if isinstance(one := getattr(look, "__self__", None), History)
    ]
    return history
