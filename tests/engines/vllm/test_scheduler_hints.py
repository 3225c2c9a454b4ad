"""vLLM's own scheduler with our connector: what requests say of their pages reaches the node."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_engine import Engine, Engines, answer, start_node, tokens
from waiting import wait_until

from gpu_agent.hint_sender import HintedPages
from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

pytestmark = pytest.mark.filterwarnings("default")

P = tokens(7, 60)  # with its answer of 8 tokens 4 blocks


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """Start a node for this file's tenant: beside others without a quota no page is retained."""
    with start_node() as node:
        yield node


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: NodeProcess) -> Iterator[Engines]:
    engines = Engines(tmp_path, monkeypatch, node.address, tenant="hints")
    yield engines
    engines.close()


def retained(client: Client) -> int:
    return client.node_status().hints.retained_count


def deleted(client: Client) -> int:
    counts = client.node_status().hints.counts
    return sum(count.pages for count in counts if count.action == "delete")


@pytest.mark.parametrize(("ranks", "window", "signed"), [(1, 0, True), (2, 40, False)])
def test_pages_of_a_request_are_retained(
    make: Engines,
    monkeypatch: pytest.MonkeyPatch,
    node: NodeProcess,
    ranks: int,
    window: int,
    signed: bool,
) -> None:
    """Of all ranks and groups; pages that the request loads as well as those that it saves."""
    groups = 2 if window else 1
    if signed:
        monkeypatch.setenv("KVSTORE_PAGE_KEY", "5a" * 32)
    with Client(ClientConfig(node.address, timeout_s=30.0)) as client:
        before = client.node_status().hints
        engine = make(ranks=ranks, window=window)
        engine.generate(P, name="plain")
        assert client.node_status().hints == before
        engine = make(ranks=ranks, window=window)
        said = {"kvstore.session": "a", "kvstore.priority": 90}
        engine.add("kept", P, 24, kv_transfer_params=said)
        time.sleep(1.0)  # pages are a session's own if they are stored later, less a call's time
        engine.run()
        assert engine.cached["kept"]
        stored = ranks * groups * 5  # of 83 tokens
        wait_until(lambda: retained(client) == before.retained_count + stored)
        gone = deleted(client)
        over = {"kvstore.session": "a", "kvstore.ended": True}
        engine.generate(P, 8, name="over", kv_transfer_params=over)
        # The plain request's pages stay, what the session alone has stored goes
        wait_until(lambda: deleted(client) == gone + ranks * groups)
        again = make(ranks=ranks, window=window)
        assert again.generate(P, 24, name="again") == answer(P, 24)
        assert again.cached["again"] == 48


def test_envelope_of_a_request_is_read(make: Engines, node: NodeProcess) -> None:
    with Client(ClientConfig(node.address, timeout_s=30.0)) as client:
        before = retained(client)
        retain = SimpleNamespace(action_type="retain", payload={"ttl_s": 60.0})
        engine = make()
        run(engine, tokens(11, 60), SimpleNamespace(actions=[retain]))
        wait_until(lambda: retained(client) == before + 4)


def run(engine: Engine, prompt: list[int], hints: Any = None, **changes: Any) -> None:
    request = engine.add("r", prompt, **changes)
    request.kv_hints = hints
    engine.run()


def test_no_request_fails_by_wrong_words_or_a_lost_node(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"kvstore.session": 7, "kvstore.priority": "high", "kvstore.tiers": {}}
    broken = SimpleNamespace(actions=[SimpleNamespace(action_type=None, payload=3), 5])
    engine = make()
    run(engine, P, broken, kv_transfer_params=wrong)
    assert engine.outputs["r"] == answer(P, 8)
    away = make({"address": "127.0.0.1:1", "connect_timeout_s": 0.2, "lookup_timeout_s": 0.2})
    run(away, P, kv_transfer_params={"kvstore.session": "a", "kvstore.priority": 90})
    assert away.outputs["r"] == answer(P, 8)


class Hostile:
    """Raise for every attribute."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("where", ["envelope", "words"])
def test_words_that_raise_end_no_engine(make: Engines, where: str) -> None:
    engine = make()
    said = {"kvstore.session": "a", "kvstore.priority": Hostile()}
    request = engine.add("r", P, kv_transfer_params=said if where == "words" else None)
    request.kv_hints = Hostile() if where == "envelope" else None
    engine.run()
    assert engine.outputs["r"] == answer(P, 8)


@pytest.mark.parametrize("skipped", ["skip", "resumable"])
def test_requests_that_the_store_skips_send_nothing(
    make: Engines, monkeypatch: pytest.MonkeyPatch, skipped: str
) -> None:
    sent: list[HintedPages] = []
    engine = make()
    assert engine.connector._lookups is not None
    monkeypatch.setattr(
        engine.connector._lookups, "hint", lambda hinted, after_s: sent.append(hinted)
    )
    said = {"kvstore.session": "a", "kvstore.priority": 90}
    if skipped == "skip":
        run(engine, P, kv_transfer_params={"kvstore.skip": True, **said})
    else:  # its client may go on with it, as a session of its own
        request = engine.add("r", P, resumable=True, kv_transfer_params=said)
        engine.run(until=lambda: request.status.name == "WAITING_FOR_STREAMING_REQ")
        engine.abort("r")
        engine.run()
    assert engine.outputs["r"] == answer(P, 8)
    assert sent == []
    assert engine.stats.data == {}
