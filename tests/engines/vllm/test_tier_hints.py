"""Hints of requests under vLLM's own scheduler: what they say reaches the node."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import Engine, model_directory, prompt

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def engine(tmp_path: Path, node: NodeProcess) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "address": node.address,
        "timeout_s": 30.0,
        "connect_timeout_s": 30.0,
    }
    waits = {"lookup_timeout_s": 20.0, "load_timeout_s": 20.0}
    engine = Engine(model_directory(tmp_path / "tiny"), {**options, **waits})
    yield engine
    engine.close()


def test_words_of_requests_reach_the_node(engine: Engine, node: NodeProcess) -> None:
    with Client(ClientConfig(node.address, timeout_s=30.0)) as client:
        before = client.node_status().hints
        engine.submit("plain", prompt(60, 3))
        engine.run()
        assert client.node_status().hints == before
        engine.submit("kept", prompt(60), transfer={"kvstore.session": "a", "kvstore.priority": 90})
        engine.run()
        kept = before.retained_count + 3
        wait_until(lambda: client.node_status().hints.retained_count == kept)
        assert client.node_status().hints.session_count == before.session_count + 1
        retain = SimpleNamespace(action_type="retain", payload={"ttl_s": 60.0, "session": "b"})
        engine.submit("hinted", prompt(60, 11), hints=SimpleNamespace(actions=[retain]))
        engine.run()
        wait_until(lambda: client.node_status().hints.retained_count == kept + 3)
        over = {"kvstore.session": "a", "kvstore.ended": True}
        engine.submit("over", prompt(60), transfer=over)
        engine.run()
        wait_until(lambda: client.node_status().hints.session_count == before.session_count + 1)
        present = client.node_status().totals
        assert present.pages_put >= 9
        wait_until(lambda: client.node_status().hints.retained_count == kept)


def test_wrong_words_are_no_error(engine: Engine) -> None:
    wrong = {"kvstore.session": 7, "kvstore.priority": "high", "kvstore.tiers": {}}
    broken = SimpleNamespace(actions=[SimpleNamespace(action_type=None, payload=3), 5])
    engine.submit("wrong", prompt(60), transfer=wrong, hints=broken)
    engine.run()
    assert engine.computed["wrong"] == 0
