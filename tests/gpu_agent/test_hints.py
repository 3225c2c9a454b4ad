"""The engines' words for hints, and their way to a node."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from known_pages import Pages
from waiting import wait_until

from gpu_agent import hint_sender
from gpu_agent.hint_sender import HintSender
from gpu_agent.hints import (
    ACTIONS_MAX,
    NOTHING,
    RANGES_MAX,
    RETAIN_S,
    RequestHints,
    Retention,
    request_hints,
)
from kvstore import Client, ClientConfig, HintAction
from kvstore.tools.node_process import NodeProcess

PAGES = Pages("hints", 4096)


def envelope(*actions: tuple[str, Any]) -> Any:
    """Return an envelope as vLLM's, of (type, payload)."""
    made = [SimpleNamespace(action_type=name, payload=payload) for name, payload in actions]
    return SimpleNamespace(actions=made)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (None, NOTHING),
        ({"kvstore.skip": True, "priority": 80, 7: 8}, NOTHING),
        ({"kvstore.session": "a"}, RequestHints("a")),
        ({"kvstore.priority": 90}, RequestHints(retentions=(Retention(90, RETAIN_S),))),
        ({"kvstore.ttl_s": 5}, RequestHints(retentions=(Retention(60, 5.0),))),
        ({"kvstore.pin_s": 1.5}, RequestHints(pin_s=1.5)),
        ({"kvstore.tiers": ["disk"]}, RequestHints(demote=True)),
        ({"kvstore.tiers": ["ram", "disk"]}, NOTHING),
        ({"kvstore.session": "a", "kvstore.ended": True}, RequestHints("a", ended=True)),
        # wrong ones are left out
        ({"kvstore.session": "x" * 65, "kvstore.priority": 101, "kvstore.ttl_s": -1}, NOTHING),
        ({"kvstore.session": 5, "kvstore.priority": True, "kvstore.pin_s": "1"}, NOTHING),
        ({"kvstore.session": "\n", "kvstore.ended": 1, "kvstore.tiers": 5}, NOTHING),
    ],
)
def test_parameters_are_read_and_wrong_ones_left_out(params: Any, said: RequestHints) -> None:
    assert request_hints(params) == said


def test_envelope_of_vllm_is_read_after_the_parameters() -> None:
    params = {"kvstore.session": "a", "kvstore.pin_s": 1}
    said = request_hints(
        params,
        envelope(
            ("Retain", {"priority": 90, "ttl_s": 7.0, "session": "b"}),
            ("pin", {"ttl_s": 3}),
            ("share", {"session": "c"}),
            ("demote", "no payload"),
        ),
        session="engine's",
    )
    assert said == RequestHints("b", (Retention(90, 7.0),), pin_s=3.0)
    assert request_hints(None, envelope(), "engine's") == RequestHints("engine's")


def test_retention_ranges_concern_the_pages_that_begin_in_them() -> None:
    ranges = [
        {"token_start": 0, "token_end": 32, "priority": 90, "duration_ms": 5000},
        {"token_start": 32, "priority": 10},
        {"token_start": "0", "priority": 10},
        "no range",
    ]
    said = request_hints(None, envelope(("retain", {"ranges": ranges})))
    sent = said.of_pages([0, 16, 32, 48])
    assert [(hint.priority, hint.ttl_s, some) for hint, some in sent] == [
        (90, 5.0, [0, 1]),
        (10, RETAIN_S, [2, 3]),
    ]


def test_ranges_of_many_actions_are_bounded_together() -> None:
    """Regression: a client's thousand actions cost the engine's thread seconds."""
    ranges = [{"token_start": at, "priority": 90} for at in range(RANGES_MAX)]
    said = request_hints(None, envelope(*[("retain", {"ranges": ranges})] * 1000))
    assert len(said.retentions) == RANGES_MAX
    said = request_hints(None, envelope(*[("retain", {"priority": 90, "ranges": ranges})] * 1000))
    assert len(said.retentions) <= RANGES_MAX + ACTIONS_MAX


def test_session_without_other_words_is_named() -> None:
    ((hint, some),) = RequestHints("a").of_pages([0, 16], age_s=3.0)
    assert (hint.action, hint.session, hint.session_age_s, some) == (
        HintAction.NAME,
        "a",
        3.0,
        [0, 1],
    )
    assert NOTHING.of_pages([0, 16]) == []


@pytest.fixture
def nobody() -> Iterator[Client]:
    """Make a client of a node that does not run."""
    with Client(ClientConfig("127.0.0.1:1", connect_timeout_s=0.1)) as client:
        yield client


def test_sender_tells_a_node_and_ends_the_session() -> None:
    pages, keys = PAGES, PAGES.keys(1, 2, 3)
    with (
        NodeProcess("--ram-bytes", "1MiB") as node,
        Client(ClientConfig(node.address, timeout_s=60.0)) as client,
    ):
        tell(client, pages, keys)


def tell(client: Client, pages: Pages, keys: list[bytes]) -> None:
    sender = HintSender(client, pages.namespace, 30.0)
    said = request_hints({"kvstore.session": "a", "kvstore.priority": 90})
    sender.begin(said)
    pages.put(client, keys)
    sender.send(said, keys, [0, 16, 32])
    wait_until(lambda: client.node_status().hints.retained_count == 3)
    over = said._replace(ended=True)
    sender.send(over, keys, [0, 16, 32])
    sender.end(over)
    wait_until(lambda: not any(client.lookup(pages.namespace, keys).present))
    sender.close()
    sender.send(said, keys, [0, 16, 32])
    assert sender.dropped == 1


def test_sender_drops_what_exceeds_its_queue_and_survives_a_lost_node(
    nobody: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "WAITING_MAX", 0)
    sender = HintSender(nobody, PAGES.namespace, 0.1)
    said = RequestHints("a")
    sender.send(said, PAGES.keys(1), [0])
    assert sender.dropped == 1
    monkeypatch.setattr(hint_sender, "WAITING_MAX", 8)
    sender.send(said, PAGES.keys(1), [0])
    wait_until(lambda: not sender._waiting)
    sender.close()
    assert sender.dropped == 1


def test_sessions_of_a_sender_are_bounded(nobody: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_sender, "SESSIONS_MAX", 3)
    sender = HintSender(nobody, PAGES.namespace, 0.1)
    for name in "abcabd":
        sender.begin(RequestHints(name))
    assert list(sender._begun) == ["a", "b", "d"]
    sender.close()
