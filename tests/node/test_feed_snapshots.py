"""Snapshots of a node's feed: how many there are, and parts that are read late or not at all."""

import contextlib
import threading
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode
from replayed import Caller, Reader, only

from kvstore import Exhausted, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from node.feed import feed as module
from node.server import Node


def test_snapshots_are_limited_and_forgotten(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, connect: Connect, pages: Pages
) -> None:
    node = start_node()
    pages.put(connect(node), pages.keys(1))
    monkeypatch.setattr(module, "SNAPSHOTS_MAX", 4)
    first, others = Reader(), [Reader() for _ in range(2)]
    first.poll(node)
    Reader().poll(node)
    with pytest.raises(Exhausted, match="2 of them to this peer"):
        Reader().poll(node)
    monkeypatch.setattr(Caller, "peer", "another")
    for reader in others:
        reader.poll(node)
    monkeypatch.setattr(Caller, "peer", "a third")
    with pytest.raises(Exhausted, match="4 snapshots"):
        Reader().poll(node)
    monkeypatch.setattr(module, "SNAPSHOT_IDLE_S", -1.0)
    node.service.feed.look()
    others[0].catch_up(node)
    first.catch_up(node)  # its snapshot is forgotten, so it begins anew
    assert first.now() == others[0].now()
    assert (first.begins, others[0].begins) == (2, 2)


def test_snapshot_that_could_not_be_read_begins_anew_for_all_calls(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may have repeated a call that waits for the disk."""
    pages.put(connect(node, "bulk"), pages.keys(1))
    reader, read, fails = Reader(), threading.Event(), threading.Event()
    name, replies = pages.namespace.model, list[pb.FeedReply]()
    assert reader.poll(node, name).begin
    request = pb.FeedRequest(cursor=reader.cursor, model=name)

    def below(*_: object) -> list[bytes]:
        read.set()
        fails.wait(60.0)
        raise Exhausted("the disk hangs")

    def call() -> None:
        with contextlib.suppress(Exhausted):
            replies.append(node.service.feed.poll(request, Caller(), lambda model: True).head)

    monkeypatch.setattr(module.Feed, "_below", below)
    calls = [threading.Thread(target=call) for _ in range(2)]
    calls[0].start()
    assert read.wait(60.0)
    calls[1].start()
    fails.set()
    for one in calls:
        one.join()
    assert [reply.begin for reply in replies] == [True]


def test_part_that_was_read_too_late_is_for_the_next_call(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each call of a reader began a snapshot anew while the disk was slow."""
    pages.put(connect(node, "bulk"), pages.keys(1))
    reader, left, below = Reader(), Caller(), module.Feed._below
    name, reads = pages.namespace.model, list[int]()
    assert reader.poll(node, name).begin

    def slow(*arguments: Any) -> list[bytes]:
        reads.append(1)
        monkeypatch.setattr(left, "has_left", lambda: True)
        return below(*arguments)

    monkeypatch.setattr(module.Feed, "_below", slow)
    with pytest.raises(Unavailable):
        node.service.feed.poll(
            pb.FeedRequest(cursor=reader.cursor, model=name), left, lambda model: True
        )
    reader.catch_up(node, name)
    assert (reader.begins, reads) == (1, [1])
    assert only(reader.now(), pages.namespace) == set(pages.keys(1))


def test_snapshot_of_a_call_that_was_given_up_is_forgotten(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: readers of a slow disk that came back had too many snapshots."""
    feed, left = start_node().service.feed, Caller()

    def read(*_: object) -> None:
        monkeypatch.setattr(left, "has_left", lambda: True)

    monkeypatch.setattr(feed, "_read_ahead", read)
    with pytest.raises(Unavailable):
        feed.poll(pb.FeedRequest(), left, lambda model: True)
    assert feed._snapshots == {}


def test_snapshot_of_an_unknown_model_visits_no_pages(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.put(connect(node), pages.keys(1))
    monkeypatch.setattr(module.Feed, "_below", None)
    assert Reader().catch_up(node, "unknown") == {}
