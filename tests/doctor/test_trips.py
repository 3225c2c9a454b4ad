"""The doctor's puts and gets of test pages, with a fake client that does one thing wrong."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import ClientConfig
from kvstore.cluster.view import Member, View
from kvstore.doctor.checks import FindingState
from kvstore.doctor.pages import PAGE_NBYTES, Pages
from kvstore.errors import Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import PutOutcome

KEY = b"k" * 32


class Client:
    """A fake client: `hits` are the results of successive gets; `changes` makes gets return other
    bytes.
    """

    def __init__(
        self, outcome: PutOutcome = PutOutcome.STORED, hits: Sequence[bool] = (True,), **about: Any
    ) -> None:
        self.outcome, self.hits = outcome, list(hits)
        self.changes, self.corrupt = about.get("changes", False), about.get("corrupt", 0)
        self.there = SimpleNamespace(on_disk=about.get("on_disk", True))
        self.checked = SimpleNamespace(
            dropped=about.get("dropped", 0), intact=about.get("intact", 1)
        )
        self.content = b""

    @property
    def stats(self) -> Any:
        return SimpleNamespace(corrupt_pages=self.corrupt)

    def put(self, namespace: Any, keys: Any, pages: Pages, keep: Any) -> list[PutOutcome]:
        self.content = bytes(pages[0])
        self.durable = keep.durable
        return [self.outcome]

    def get(self, namespace: Any, keys: Any, buffers: Any) -> list[bool]:
        buffers[0][:] = self.content[::-1] if self.changes else self.content
        return [self.hits.pop(0)]

    def stat(self, namespace: Any, keys: Any) -> list[Any]:
        return [self.there]

    def verify(self, namespace: Any, keys: Any) -> Any:
        return self.checked


@pytest.fixture
def pages() -> Pages:
    return Pages(ClientConfig(page_key="ab" * 32), pb.HelloReply(), None)


@pytest.mark.parametrize(
    ("client", "state", "message"),
    [
        (Client(), FindingState.OK, f"{PAGE_NBYTES >> 10} KiB came back equal"),
        (Client(hits=(False, True)), FindingState.OK, "came back equal"),
        (Client(PutOutcome.EXISTS), FindingState.OK, "came back equal"),
        (Client(hits=(False, False)), FindingState.FAIL, "is not found"),
        (Client(PutOutcome.FULL, hits=(False,)), FindingState.FAIL, "no space"),
        (Client(PutOutcome.AWAY, hits=(False,)), FindingState.FAIL, "no owner"),
        (Client(changes=True), FindingState.FAIL, "other bytes"),
        (Client(hits=(False,), corrupt=1), FindingState.FAIL, "other bytes"),
    ],
)
def test_round_trip_of_a_page_is_checked(
    pages: Pages, client: Any, state: FindingState, message: str
) -> None:
    found = pages._trip("bulk", client, KEY)
    assert (found.state, message in found.found) == (state, True), found


@pytest.mark.parametrize(
    ("client", "state", "message"),
    [
        (Client(), FindingState.OK, "its copy on disk is intact"),
        (Client(dropped=1), FindingState.FAIL, "does not match its checksum"),
        (Client(on_disk=False), FindingState.FAIL, "is not on disk"),
        (Client(intact=0), FindingState.FAIL, "is not on disk"),
    ],
)
def test_durable_page_is_checked(
    pages: Pages, client: Any, state: FindingState, message: str
) -> None:
    found = pages._durable(client, KEY)
    assert (found.state, message in found.found) == (state, True), found
    assert client.durable


def test_pages_are_not_keyed_and_each_member_owns_one(pages: Pages) -> None:
    assert (pages._config.page_key, pages._config.page_key_file) == ("", "")
    members = tuple(Member(f"n{number}", f"10.0.0.{number}:7440") for number in range(4))
    view = View("fleet", 1, members, 2)
    of_cluster = Pages(ClientConfig(), pb.HelloReply(), view)
    for member in members:
        keys = [of_cluster._key(member.id) for _ in range(8)]
        assert {owners[0] for owners in view.owners.owners(of_cluster.namespace.digest, keys)} == {
            member.id
        }


def test_pages_check_after_a_failed_removal_puts_no_more(pages: Pages) -> None:
    assert list(pages.clean()) == [], "no page was put before"
    with pytest.raises(Unavailable, match="over"), pages._under_way():
        raise AssertionError("a put began")
