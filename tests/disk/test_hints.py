"""Hints of a client: over each wire, with a disk, and what the node tells of them."""

import pytest
from disk_nodes import Nodes, Pages
from waiting import wait_until

from kvstore import Client, Hint, HintAction, HintResult, InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE

RETAIN = Hint(HintAction.RETAIN, ttl_s=60.0, session="s")


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_hint_is_answered_and_counted(nodes: Nodes, pages: Pages, wire: str) -> None:
    node = nodes.start()
    client = nodes.connect(node, wire=wire)
    keys = pages.keys(*range(4))
    pages.put(client, keys)
    assert client.hint(pages.namespace, keys, RETAIN) == HintResult(accepted=4)
    result = client.hint(pages.namespace, pages.keys(0, 9), RETAIN)
    assert (result.accepted, result.refused) == (1, 1)
    assert result.reasons == ("the page is not here",)
    longer = client.hint(pages.namespace, keys, Hint(HintAction.PIN, ttl_s=1e8))
    assert (longer.clipped, len(longer.reasons)) == (4, 1)
    status = client.node_status().hints
    counts = {(count.action, count.verdict): count.pages for count in status.counts}
    assert counts == {("retain", "accepted"): 5, ("retain", "refused"): 1, ("pin", "clipped"): 4}
    assert (status.retained_count, status.session_count) == (4, 1)


def test_demoted_and_prefetched_pages_leave_ram_and_return(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(8))
    pages.put(client, keys, durable=True)

    def in_ram() -> int:
        return sum(page.in_ram for page in client.stat(pages.namespace, keys))

    before = client.node_status().totals.pages_got
    demoted = client.hint(pages.namespace, keys, Hint(HintAction.DEMOTE))
    assert (demoted, in_ram()) == (HintResult(accepted=8), 0)
    fetched = client.hint(pages.namespace, keys, Hint(HintAction.PREFETCH))
    assert fetched == HintResult(accepted=8)
    wait_until(lambda: in_ram() == 8 and not node.tier.held_count)
    assert client.node_status().totals.pages_got == before, "a prefetch is no get"
    assert pages.get(client, keys) == [True] * 8


def test_retained_page_on_disk_only_is_clipped(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    assert client.hint(pages.namespace, keys, RETAIN).clipped == 1


def test_deleted_session_leaves_shared_prefixes(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    prompt, ours, mine = pages.keys(0, 1), pages.keys(2, 3), pages.keys(4, 5)
    pages.put(client, prompt, durable=True)
    client.hint(pages.namespace, prompt, Hint(HintAction.NAME, session="begun long before"))
    begun = node.tier.clock_ms()
    wait_until(lambda: node.tier.clock_ms() > begun)
    for session in ("a", "b"):
        client.hint(pages.namespace, prompt, Hint(HintAction.NAME, session=session))
    pages.put(client, [*ours, *mine], durable=True)
    client.hint(pages.namespace, [*prompt, *ours, *mine], Hint(HintAction.NAME, session="a"))
    client.hint(pages.namespace, [*prompt, *ours], Hint(HintAction.NAME, session="b"))
    ended = client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="a"))
    assert ended == HintResult(deleted=2)
    present = client.lookup(pages.namespace, [*prompt, *ours, *mine]).present
    assert present == (True,) * 4 + (False,) * 2
    assert pages.on_disk(node, mine) == [False] * 2
    assert client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="a")).deleted == 0
    # `a`, too: `ours` stays a shared page until nobody remembers
    assert client.node_status().hints.session_count == 3


def test_deleted_session_leaves_older_pages_that_it_loaded_from_disk(
    nodes: Nodes, pages: Pages
) -> None:
    """Regression: a page counted as stored when it came back to RAM, so its reader deleted it."""
    node = nodes.start()
    client = nodes.connect(node)
    prompt, mine = pages.keys(0, 1), pages.keys(2, 3)
    pages.put(client, prompt, durable=True)
    pages.drop_from_ram(node)
    began_ms = node.tier.clock_ms()
    wait_until(lambda: node.tier.clock_ms() > began_ms)
    assert pages.get(client, prompt) == [True] * 2
    pages.put(client, mine, durable=True)
    age_s = (node.tier.clock_ms() - began_ms - 1) / 1000
    hint = Hint(HintAction.NAME, session="s", session_age_s=age_s)
    client.hint(pages.namespace, [*prompt, *mine], hint)
    assert client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="s")).deleted == 2
    assert client.lookup(pages.namespace, [*prompt, *mine]).present == (True, True, False, False)


def test_deleted_session_leaves_what_others_retain_and_pins(nodes: Nodes, pages: Pages) -> None:
    """Regression: a client without a session retained a page, and another's session deleted it."""
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    client.hint(pages.namespace, keys, Hint(HintAction.NAME, session="s", session_age_s=60.0))
    client.hint(pages.namespace, keys[2:], RETAIN)
    client.hint(pages.namespace, keys[1:3], Hint(HintAction.RETAIN, ttl_s=60.0))
    client.pin(pages.namespace, keys[3:], 60.0)
    ended = client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="s"))
    assert ended == HintResult(deleted=1)
    assert client.lookup(pages.namespace, keys).present == (False, True, True, True)
    assert node.tier.check() == []


def test_deleted_session_leaves_a_page_that_was_pinned_on_disk(nodes: Nodes, pages: Pages) -> None:
    """Regression: only the pins of RAM counted."""
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(0, 1)
    pages.put(client, keys, durable=True)
    client.hint(pages.namespace, keys, Hint(HintAction.NAME, session="s", session_age_s=60.0))
    pages.drop_from_ram(node)
    client.pin(pages.namespace, keys[:1], 60.0)
    assert client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="s")).deleted == 1
    assert client.lookup(pages.namespace, keys).present == (True, False)


def test_hints_with_a_session_are_recorded(nodes: Nodes, pages: Pages) -> None:
    client = nodes.connect(nodes.start())
    keys = pages.keys(0, 1)
    pages.put(client, keys)
    name = client.record(60.0).recording
    client.lookup(pages.namespace, keys)
    client.hint(pages.namespace, keys, RETAIN)
    client.hint(pages.namespace, keys, Hint(HintAction.DEMOTE))  # of no session
    client.hint(pages.namespace, keys, Hint(HintAction.RETAIN, 0, ttl_s=1.0, session="s"))
    uses = client.record(recording=name, end=True).uses
    assert [(use.stored, bool(use.session), use.ended) for use in uses] == [
        (False, False, False),
        (True, True, False),
        (True, True, True),
    ]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (pb.HintRequest.FromString(b"\x18\x4d"), "knows no hint with action 77"),
        (pb.HintRequest(action=pb.HINT_DELETE), "names a session and no keys"),
        (pb.HintRequest(action=pb.HINT_RETAIN, priority=101, ttl_ms=1), "not in 0..100"),
        (pb.HintRequest(action=pb.HINT_RETAIN), "needs a time"),
        (pb.HintRequest(action=pb.HINT_NAME, session=bytes(65)), "at most 64"),
    ],
)
def test_wrong_hint_is_refused(
    nodes: Nodes, pages: Pages, request_: pb.HintRequest, why: str
) -> None:
    node = nodes.start()
    nodes.connect(node).open(pages.namespace)
    request = pb.HintRequest(namespace=pages.digest)
    request.MergeFrom(request_)
    if request.action != pb.HINT_DELETE:
        request.prefix_hashes.append(pages.key(1))
    with pytest.raises(InvalidRequest, match=why):
        node.service.call("hint", request, THE_NODE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 101},
        *({"ttl_s": seconds} for seconds in (0.0, 1e10, float("inf"), float("nan"))),
        {"session_age_s": -1.0},
        {"session": "x" * 65},
    ],
    ids=str,
)
def test_wrong_hint_is_refused_by_the_client(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Hint(HintAction.RETAIN, **{"ttl_s": 1.0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        Hint(HintAction.DELETE)


def test_prefetches_beyond_the_queue_are_refused(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client: Client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    prefetcher = node.service.hints.prefetcher
    with prefetcher._changed:  # its thread can take none
        prefetcher._running = True
    hint = Hint(HintAction.PREFETCH)
    verdicts = [client.hint(pages.namespace, keys, hint).accepted for _ in range(200)]
    assert verdicts == [4] * 128 + [0] * 72, "one peer has half of the queue"
    with prefetcher._changed:
        prefetcher._waiting.clear()
        prefetcher._running = False
