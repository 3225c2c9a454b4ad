"""Calls with less time than a node needs, beside calls with enough time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_node import FakeNode, ServeBulk, scripted

from kvstore import ClientConfig, DeadlineExceeded, Namespace, Unavailable, opaque_layout
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import EVIDENCE_S, NodeChannel
from kvstore.transports.frames import pack_fixed

NAMESPACE = Namespace("m", opaque_layout(4096))
KEYS = [b"k" * 32]


def config(fake: Any, **fields: Any) -> ClientConfig:
    return ClientConfig(address=fake.address, timeout_s=60.0, connect_timeout_s=20.0, **fields)


def looked_up(link: Any, deadline: Deadline) -> int:
    request = pb.LookupRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS)
    return int(link.wire.call("lookup", request, deadline).prefix_pages)


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = Deadline(seconds)
    while not true():
        end.remaining()
        threading.Event().wait(0.005)


def test_short_timeout_does_not_drop_the_link(
    fake_node: FakeNode, bulk_port: ServeBulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a call without the time for a new connection dropped the link.

    If there was no time for another link either, the circuit breaker shut all others out.
    """
    present = pb.BulkReply(
        lookup=pb.LookupReply(present=[True], prefix_pages=1)
    ).SerializeToString()
    monkeypatch.setattr("kvstore.transports.channel.LIVES_S", 60.0)
    first, answer_now = [True], threading.Event()

    def talk(connection: Any) -> None:
        if first:
            first.clear()
            scripted()(connection)  # answers only the hello
        else:
            answer_now.wait(60.0)
            scripted(pack_fixed(len(present), 0) + present)(connection)

    fake_node.bulk_port = bulk_port(talk).port
    link = NodeChannel(fake_node.address, config(fake_node, wire="bulk"))
    link.run(lambda link, deadline: None, None, Deadline(60))
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            link.run(looked_up, None, Deadline(EVIDENCE_S / 2))
    answer_now.set()
    assert link.run(looked_up, None, Deadline(60)) == 1
    assert link.connect_count == 1
    link.close()


def test_urgent_waiters_do_not_starve_others(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a restart of the node each trial of the breaker went to a call without the
    time to connect.
    """
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc"))
    negotiate = link._negotiation.open

    def slow(deadline: Deadline) -> Any:
        if not threading.Event().wait(min(EVIDENCE_S, deadline.remaining())) and deadline.passed:
            raise Unavailable("it did not answer in time")
        return negotiate(deadline)

    monkeypatch.setattr(link._negotiation, "open", slow)
    with pytest.raises(Unavailable, match="in time"):
        link.run(looked_up, NAMESPACE, Deadline(EVIDENCE_S / 2))
    eventually(lambda: not link._running and link.wire_name == "grpc")
    assert link.run(looked_up, NAMESPACE, Deadline(60)) == 1
    assert link.connect_count == 1
    link.close()


def test_short_timeouts_open_the_breaker_of_a_hanging_node(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every call with a short timeout waited for the hanging node."""
    monkeypatch.setattr("kvstore.transports.channel.LIVES_S", 0.3)
    monkeypatch.setattr("kvstore.transports.channel.PAUSE_PER_COST", 1000)
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc", backoff_s_max=600.0))
    assert link.run(looked_up, NAMESPACE, Deadline(60)) == 1

    def silent(op: str, request: Any, deadline: Deadline) -> Any:
        threading.Event().wait(deadline.remaining())
        raise DeadlineExceeded("no answer")

    assert link._connection
    monkeypatch.setattr(link._connection.wire, "call", silent)
    with pytest.raises(DeadlineExceeded):
        link.run(looked_up, NAMESPACE, Deadline(EVIDENCE_S / 2))
    eventually(lambda: not link._running)
    with pytest.raises(Unavailable, match="next try"):
        link.run(looked_up, NAMESPACE, Deadline(EVIDENCE_S / 2))
    link.close()


def test_one_late_answer_to_a_short_call_does_not_open_the_breaker(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with less time than EVIDENCE_S says little about the node to other threads."""
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc"))
    assert link.run(looked_up, NAMESPACE, Deadline(60)) == 1

    def silent(op: str, request: Any, deadline: Deadline) -> Any:
        raise DeadlineExceeded("no answer")

    assert link._connection
    with monkeypatch.context() as patch:
        patch.setattr(link._connection.wire, "call", silent)
        patch.setattr(NodeChannel, "_in_background", lambda *_: None)
        with pytest.raises(DeadlineExceeded):
            link.run(looked_up, NAMESPACE, Deadline(EVIDENCE_S / 2))
        assert not link.failing
    assert link.run(looked_up, NAMESPACE, Deadline(60)) == 1
    link.close()
