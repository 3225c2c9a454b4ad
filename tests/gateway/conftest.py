"""Fixtures for nodes in the test's process with gateways in processes of their own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_store import Store
from request_stream import RequestStream


@pytest.fixture(scope="module")
def start_store() -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def start(**settings: Any) -> Store:
        made.append(Store(**settings))
        return made[-1]

    yield start
    for store in made:
        assert store.node.check() == []
        store.close()


@pytest.fixture
def frames() -> Iterator[RequestStream]:
    made = RequestStream()
    yield made
    made.end()
