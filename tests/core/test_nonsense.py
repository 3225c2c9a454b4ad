"""A node that sends invalid answers causes a kvstore error or a miss."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_node import FakeNode

from kvstore import Client, ClientConfig, Namespace, ProtocolError, opaque_layout
from kvstore.cluster.calls import check_goes_on, look_up, put_outcomes
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb

NAMESPACE = Namespace("m", opaque_layout(4096))
KEYS = [b"k" * 32]


class Nonsense:
    """A wire whose node gives one fixed answer."""

    def __init__(self, answer: Any) -> None:
        self.call = self.put = lambda *_: answer


@pytest.mark.parametrize("count", [0, 2])
def test_lookup_answer_of_wrong_length_is_refused(count: int) -> None:
    """Regression: a lookup of one page reported two pages as found."""
    link: Any = SimpleNamespace(
        limits=pb.Limits(batch_keys_max=8), wire=Nonsense(pb.LookupReply(present=[True] * count))
    )
    with pytest.raises(ProtocolError, match="for"):
        look_up(link, NAMESPACE, KEYS, False, Deadline(1.0))


def test_unknown_verdict_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="77"):
        put_outcomes([77])


def test_node_that_accepts_no_keys_is_refused(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(type(fake_node).Hello.__globals__, "LIMITS", pb.Limits())
    with (
        Client(ClientConfig(address=fake_node.address, wire="grpc")) as client,
        pytest.raises(ProtocolError, match="no keys at all"),
    ):
        client.lookup(NAMESPACE, KEYS)


ANSWERS: dict[str, Any] = {
    "remove": pb.RemoveReply(removed=[True, True]),
    "pin": pb.PinReply(),
    "unpin": pb.UnpinReply(unpinned=[True] * 3),
    "stat": pb.StatReply(pages=[pb.PageStat(), pb.PageStat()]),
}


@pytest.fixture
def answered(fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the client's node answer all calls with one reply."""
    with Client(ClientConfig(address=fake_node.address, wire="grpc")) as client:
        client.lookup(NAMESPACE, KEYS)

        def answer(reply: Any) -> Client:
            monkeypatch.setattr("kvstore.transports.grpc_wire.GrpcWire.call", lambda *_: reply)
            return client

        yield answer


@pytest.mark.parametrize("op", ANSWERS)
def test_answers_of_wrong_length_are_protocol_errors(answered: Any, op: str) -> None:
    client = answered(ANSWERS[op])
    more = (60.0,) if op == "pin" else ()
    with pytest.raises(ProtocolError, match=r"values of .* for 1 keys"):
        getattr(client, op)(NAMESPACE, KEYS, *more)


def test_feed_of_a_model_that_is_not_described_is_a_protocol_error(answered: Any) -> None:
    client = answered(pb.FeedReply(changes=[pb.FeedChange(model=b"m", prefix_hashes=KEYS)]))
    with pytest.raises(ProtocolError, match="did not describe"):
        next(client.feed("m"))


@pytest.mark.parametrize("token", [b"a", b"b"])
def test_list_without_progress_ends(answered: Any, token: bytes) -> None:
    client = answered(pb.ListReply(pages=[pb.PageStat(prefix_hash=b"b")], next_page_token=token))
    with pytest.raises(ProtocolError, match="makes no progress"):
        list(client.list_pages(NAMESPACE, after=b"b"))


@pytest.mark.parametrize("token", [b"b", b"a"])
def test_list_that_makes_no_progress_is_refused(token: bytes) -> None:
    """A list whose token repeats or goes back would be requested without end."""
    check_goes_on(pb.ListRequest(page_token=b"b"), pb.ListReply(next_page_token=b"c"))
    check_goes_on(pb.ListRequest(page_token=b"b"), pb.ListReply())
    with pytest.raises(ProtocolError, match="no progress"):
        check_goes_on(pb.ListRequest(page_token=b"b"), pb.ListReply(next_page_token=token))
