"""Polling members for their status: at intervals, within a time limit, in a fair order."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cluster.view import Member, View
from kvstore.errors import Unavailable
from kvstore.pb import kvstore_pb2 as pb
from node.console import members as module
from node.console.members import ASKED_S, CALL_S, ROUND_S, Members, summary

OWN = pb.NodeStatusReply(state="SERVING")


class Fleet:
    """Fake members on a fake clock; a polling round runs when a test calls `do`."""

    def __init__(self, count: int) -> None:
        self.now_s, self.took_s = 1000.0, 0.0
        self.member, self.asked, self.limits = "n0", list[str](), list[float]()
        self.rounds: list[tuple[Callable[[], object], Future[Any]]] = []
        self.leave(count)

    def leave(self, count: int) -> None:
        self.view = View(
            "fleet", 1, tuple(Member(f"n{n}", f"10.0.0.{n}:7440") for n in range(count))
        )

    def channel(self, member: str) -> Any:
        def run(call: Any, again: Any, deadline: Any) -> pb.NodeStatusReply:
            self.asked.append(member)
            self.limits.append(deadline.left_s)
            self.now_s += self.took_s
            if member == "n2":
                raise Unavailable("it is away")
            return pb.NodeStatusReply(state="SERVING", disk=pb.DiskStatus(page_count=7))

        return SimpleNamespace(run=run)

    def submit_round(self, do: Callable[[], object]) -> "Future[Any]":
        self.rounds.append((do, Future()))
        return self.rounds[-1][1]

    def do(self) -> None:
        work, done = self.rounds[-1]
        work()
        done.set_result(None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Fleet, Members]]:
    def make(count: int) -> tuple[Fleet, Members]:
        fleet: Any = Fleet(count)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: fleet.now_s))
        monkeypatch.setattr(module, "Deadline", lambda left_s: SimpleNamespace(left_s=left_s))
        return fleet, Members(fleet, fleet, fleet.submit_round)

    return make


def test_console_polls_members_in_rounds_without_overlap(
    made: Callable[[int], tuple[Fleet, Members]],
) -> None:
    fleet, members = made(3)
    members.describe(OWN)
    fleet.now_s += 10 * ASKED_S
    members.describe(OWN)
    assert len(fleet.rounds) == 1, "the first round has not ended"
    fleet.do()
    assert sorted(fleet.asked) == ["n1", "n2"], "a node must not ask itself"
    members.describe(OWN)
    assert len(fleet.rounds) == 2
    fleet.do()
    fleet.now_s += ASKED_S / 2
    members.describe(OWN)
    assert len(fleet.rounds) == 2


def test_member_statuses_have_an_age_and_former_members_are_dropped(
    made: Callable[[int], tuple[Fleet, Members]],
) -> None:
    fleet, members = made(3)
    members.describe(OWN)
    fleet.do()
    fleet.now_s += 3.0
    own, one, other = members.describe(OWN)["members"]
    assert (own["age_s"], one["age_s"], other["age_s"]) == (0.0, 3.0, 3.0)
    assert (own["status"]["disk"], one["status"]["disk"]["page_count"]) == (None, 7)
    assert (other["status"], other["error"]) == (None, "it is away")
    fleet.leave(2)
    fleet.now_s += ASKED_S
    members.describe(OWN)
    fleet.do()
    assert members._statuses.keys() == {"n1"}


def test_polling_round_ends_in_time_and_skipped_members_are_next(
    made: Callable[[int], tuple[Fleet, Members]],
) -> None:
    fleet, members = made(12)
    fleet.took_s = CALL_S
    members.describe(OWN)
    fleet.do()
    first = list(fleet.asked)
    assert len(first) == ROUND_S / CALL_S
    assert max(fleet.limits) == CALL_S
    fleet.took_s = CALL_S * 0.99
    members.describe(OWN)
    fleet.do()
    assert not set(first) & set(fleet.asked[len(first) : len(first) + 5])
    assert min(fleet.limits) < CALL_S, "the last call gets only the rest of the round"


def test_summary_without_a_disk_has_none() -> None:
    assert summary(OWN)["disk"] is None
