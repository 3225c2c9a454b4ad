"""The engines' words for hints, and their way to a node."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from known_pages import Pages
from waiting import wait_until

from gpu_agent import hint_sender
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.hint_sender import HintedPages, HintQueue, HintSender
from gpu_agent.hints import (
    ACTIONS_MAX,
    NOTHING,
    RANGES_MAX,
    RETAIN_S,
    RequestHints,
    Retention,
    request_hints,
)
from gpu_agent.worker.choice import lookup_backend_for
from kvstore import Client, ClientConfig, Hint, HintAction, HintResult
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


def test_of_ranges_that_overlap_the_last_one_holds() -> None:
    """Regression: each of them was a hint about all of its pages."""
    ranges = [
        {"token_start": 0, "token_end": end, "priority": priority, "duration_ms": 5000}
        for end, priority in ((64, 90), (48, 80), (32, 90), (16, 70))
    ]
    said = request_hints({"kvstore.session": "a", "kvstore.ranges": ranges})
    sent = said.of_pages(range(15, 79, 16))
    assert [(hint.priority, some) for hint, some in sent] == [(90, [1, 3]), (80, [2]), (70, [0])]


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


@pytest.fixture(scope="module")
def hinted() -> Iterator[Client]:
    """Start a node and make a client of it."""
    with (
        NodeProcess("--ram-bytes", "1MiB") as node,
        Client(ClientConfig(node.address, timeout_s=60.0, connect_timeout_s=20.0)) as client,
    ):
        yield client


def test_sender_tells_a_node_and_ends_the_session(hinted: Client) -> None:
    tell(hinted, PAGES, PAGES.keys(1, 2, 3))


def hinted_pages(said: RequestHints, keys: list[bytes], age_s: float = 0.0) -> HintedPages:
    """Return what a request of a session of this age says of pages."""
    groups = [([PAGES.namespace], keys)]
    return HintedPages(said, groups, [range(0, 16 * len(keys), 16)], time.monotonic() - age_s)


def begin_early(sender: HintSender, said: RequestHints) -> None:
    """Begin a session so early that its pages are its own, however late a hint arrives."""
    sender.begin(said)
    sender._begun[said.session] -= 60.0


def tell(client: Client, pages: Pages, keys: list[bytes]) -> None:
    queue = HintQueue(client, 30.0)
    sender, group = HintSender(queue.send), [([pages.namespace], keys)]
    said = request_hints({"kvstore.session": "a", "kvstore.priority": 90})
    begin_early(sender, said)
    pages.put(client, keys)
    sender.send(said, group, [[0, 16, 32]])
    wait_until(lambda: client.node_status().hints.retained_count == 3)
    over = said._replace(ended=True)
    sender.send(over, group, [[0, 16, 32]])
    sender.end(over, [[pages.namespace]])
    wait_until(lambda: not any(client.lookup(pages.namespace, keys).present))
    queue.close()
    sender.send(said, group, [[0, 16, 32]])
    assert queue.dropped == 1


def test_hint_comes_again_for_pages_that_are_stored_later(hinted: Client) -> None:
    """Also the end of a session waits for them."""
    queue = HintQueue(hinted, 30.0)
    early, late = PAGES.keys(11, 12), PAGES.keys(13)
    sender = HintSender(queue.send, after_s=(0.0, 1.0))
    said = request_hints({"kvstore.session": "late", "kvstore.priority": 90})
    begin_early(sender, said)
    PAGES.put(hinted, early)
    before = hinted.node_status().hints.retained_count
    sender.send(said, [([PAGES.namespace], early + late)], [[0, 16, 32]])
    wait_until(lambda: hinted.node_status().hints.retained_count == before + 2)
    PAGES.put(hinted, late)
    wait_until(lambda: hinted.node_status().hints.retained_count == before + 3)
    assert queue.waiting_count == 0  # no third try
    over = said._replace(ended=True)
    new = PAGES.keys(14)
    sender.send(over, [([PAGES.namespace], early + late + new)], [[0, 16, 32, 48]])
    sender.end(over, [[PAGES.namespace]])
    PAGES.put(hinted, new)
    wait_until(lambda: not any(hinted.lookup(PAGES.namespace, early + late + new).present))
    queue.close()


def test_hint_that_is_due_overtakes_a_later_one(hinted: Client) -> None:
    queue = HintQueue(hinted, 30.0)
    keys = PAGES.keys(21)
    PAGES.put(hinted, keys)
    due = hinted_pages(RequestHints("due"), keys)
    before = hinted.node_status().hints.session_count
    queue.send(due, (3600.0,))
    queue.send(due, (0.0,))
    wait_until(lambda: hinted.node_status().hints.session_count == before + 1)
    assert queue.waiting_count == 1
    queue.close()
    assert (queue.waiting_count, queue.dropped) == (0, 1)


def test_session_grows_older_while_its_hint_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise pages that are stored meanwhile would seem older than the session."""
    sent: list[Hint] = []

    class Recorder:
        def hint(self, namespace: Any, keys: Any, hint: Hint, timeout_s: float) -> HintResult:
            sent.append(hint)
            return HintResult(refused=1)

    queue: Any = HintQueue(Recorder(), 1.0)  # type: ignore[arg-type]
    queue.send(hinted_pages(RequestHints("a"), PAGES.keys(1), age_s=10.0), (0.0, 0.3))
    wait_until(lambda: len(sent) == 2)
    queue.close()
    assert 10.0 <= sent[0].session_age_s <= sent[1].session_age_s - 0.25


def test_queue_drops_what_exceeds_it_and_survives_a_lost_node(
    nobody: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "WAITING_MAX", 0)
    queue = HintQueue(nobody, 0.1)
    sender, group = HintSender(queue.send), [([PAGES.namespace], PAGES.keys(1))]
    said = RequestHints("a")
    sender.send(said, group, [[0]])
    assert queue.dropped == 1
    monkeypatch.setattr(hint_sender, "WAITING_MAX", 8)
    for _ in range(2):  # its thread goes on
        sender.send(said, group, [[0]])
        wait_until(lambda: not queue.waiting_count)
    queue.close()
    assert queue.dropped == 1


def test_queue_bounds_the_pages_of_waiting_words(
    nobody: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "WAITING_KEYS_MAX", 5)
    queue, hinted = HintQueue(nobody, 0.1), hinted_pages(RequestHints("a"), PAGES.keys(1, 2))
    for seconds in (0.0, 3600.0, 3600.0, 3600.0):
        queue.send(hinted, (seconds,))
        if not seconds:
            wait_until(lambda: not queue.waiting_count)  # frees its place
    assert (queue.waiting_count, queue.dropped) == (2, 1)
    queue.close()


def test_queue_goes_on_after_a_call_that_fails_unexpectedly() -> None:
    """Regression: its thread ended, and further hints waited for ever."""
    asked: list[Hint] = []

    class Broken:
        def hint(self, namespace: Any, keys: Any, hint: Hint, timeout_s: float) -> HintResult:
            asked.append(hint)
            raise ValueError("unexpected")

    queue: Any = HintQueue(Broken(), 1.0)  # type: ignore[arg-type]
    for count in (1, 2):
        queue.send(hinted_pages(RequestHints("a"), PAGES.keys(1)), (0.0,))
        wait_until(lambda count=count: len(asked) == count)  # type: ignore[misc]
    queue.close()


def test_closed_queue_makes_no_further_call_of_a_request() -> None:
    """A request of many shards may need hundreds, each as long as its deadline."""
    asked: list[Hint] = []

    class Slow:
        def hint(self, namespace: Any, keys: Any, hint: Hint, timeout_s: float) -> HintResult:
            asked.append(hint)
            wait_until(lambda: queue._closed)
            return HintResult(refused=1)

    queue: Any = HintQueue(Slow(), 1.0)  # type: ignore[arg-type]
    groups = [([PAGES.namespace] * 100, PAGES.keys(1))]
    queue.send(HintedPages(RequestHints("a"), groups, [range(1)], 0.0), (0.0, 1.0))
    wait_until(lambda: asked)
    queue.close()
    assert (len(asked), queue.waiting_count) == (1, 0)


def test_sessions_of_a_sender_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_sender, "SESSIONS_MAX", 3)
    sender = HintSender(lambda hinted, after_s: None)
    for name in "abcabd":
        sender.begin(RequestHints(name))
    assert list(sender._begun) == ["a", "b", "d"]


@pytest.mark.parametrize("where", ["threads", "process"])
def test_hint_of_a_scheduler_reaches_the_node(hinted: Client, where: str) -> None:
    backend = lookup_backend_for(hinted.config, False, where)
    lookups = Lookups(backend, 30.0)
    pages = Pages(f"scheduler's {where}", 4096)
    keys = pages.keys(1, 2)
    pages.put(hinted, keys)
    before = hinted.node_status().hints.retained_count
    # Regression: a time of less than a millisecond ended the process
    for ttl_s in (1e-9, 60.0):
        said = RequestHints("s", (Retention(90, ttl_s),))
        groups = [([pages.namespace], keys), ([pages.namespace], [])]
        lookups.hint(HintedPages(said, groups, [range(2), range(0)], time.monotonic()), (0.0, 0.1))
    wait_until(lambda: hinted.node_status().hints.retained_count == before + 2)
    lookups.close()
