"""A client's links to the members of the newest view: which are kept and closed, and what they
count.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from kvstore.cluster.nodes import Nodes
from kvstore.cluster.view import Member, View, view_message
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import ProtocolError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import NodeChannel


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(ClientConfig(address="host-0:7440"))
    yield nodes
    nodes.close()


def hello(number: int, of: Sequence[int], cluster: str = "fleet") -> pb.HelloReply:
    members = tuple(Member(f"n{i}", f"host-{i}:7440") for i in of)
    return pb.HelloReply(view=view_message(View(cluster, number, members)))


def addresses(nodes: Nodes) -> list[str]:
    return [address.partition(":")[0] for address in nodes.all()]


def member(nodes: Nodes, name: str) -> NodeChannel:
    assert nodes.view is not None
    return nodes.member(nodes.view, name)


def test_newest_view_stays_in_force_when_older_ones_arrive(nodes: Nodes) -> None:
    assert addresses(nodes) == ["host-0"]
    nodes._learn(hello(5, [0, 1]))
    nodes._learn(hello(4, [0, 2]))
    assert addresses(nodes) == ["host-0", "host-1"]
    nodes._learn(hello(6, [1, 2]))
    assert addresses(nodes) == ["host-1", "host-2"]
    with pytest.raises(ProtocolError, match="belongs to the cluster other, the others to fleet"):
        nodes._learn(hello(7, [0], "other"))
    assert nodes.view is not None
    assert nodes.view.number == 6


def test_former_member_has_no_link_and_keeps_its_counters(nodes: Nodes) -> None:
    nodes._learn(hello(1, [0, 1, 2]))
    gone, stays = member(nodes, "n1"), member(nodes, "n2")
    gone.connect_count, gone.failure_count = 3, 2
    stays.connect_count, stays.failure_count = 10, 20
    nodes._learn(hello(2, [0, 2]))
    assert nodes.counts == (13, 22)
    with pytest.raises(Unavailable, match="this client is closed"):
        gone.run(lambda link, limit: None, None, Deadline(5.0))
    assert member(nodes, "n2") is stays
    assert not stays._closed
    assert not nodes.only._closed  # the address of the configuration


def test_closed_client_connects_to_no_new_member(nodes: Nodes) -> None:
    nodes.close()
    nodes._learn(hello(1, [0, 1]))
    with pytest.raises(Unavailable, match="this client is closed"):
        member(nodes, "n1").run(lambda link, limit: None, None, Deadline(5.0))


def test_near_node_is_searched_again_after_a_while(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [1000.0], list[float]()
    monkeypatch.setattr("kvstore.cluster.nodes.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(nodes, "_nearest", lambda view, deadline: looked.append(now[0]))
    nodes._learn(hello(1, [0, 1]))
    for now[0] in (1000.0, 1029.0, 1031.0, 1032.0, 1062.0):
        assert nodes.near(Deadline(5.0)) is None
    assert looked == [1000.0, 1031.0, 1062.0]
    nodes._learn(hello(2, [0, 1, 2]))
    assert nodes.near(Deadline(5.0)) is None
    assert len(looked) == 4, "a new view starts a new search"


def test_single_node_recovering_while_read_is_not_some_fail(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's state is read once; otherwise a failed call would count as a miss."""
    answers = iter([True, False, False])
    monkeypatch.setattr(NodeChannel, "failing", property(lambda link: next(answers)))
    monkeypatch.setattr(NodeChannel, "wire_name", "bulk")
    assert not nodes.some_fail
