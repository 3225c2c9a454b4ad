"""Outages in the log: begin and end, not every request."""

import logging

import pytest

from gpu_agent.outage import OUTAGES_S, Outage
from kvstore import DeadlineExceeded, Exhausted, InvalidRequest, Unavailable


def test_an_outage_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    with caplog.at_level(logging.INFO):
        for error in (None, Unavailable("down"), DeadlineExceeded("late"), Unavailable("down"), None, None):
            outage.report(error)
    assert [record.message for record in caplog.records] == [
        "the store failed, the engine recomputes until it is back: down",
        "the store answers again",
    ]
    assert outage.error is None


def test_a_store_that_fails_and_answers_by_turns_is_told_of_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    outage = Outage(lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            outage.report(Unavailable("down"))
            assert outage.error is not None
            outage.report(None)
            assert outage.error is None
            now[0] += 0.1
        outage.report(Unavailable("down"))
        now[0] += OUTAGES_S
        outage.report(Unavailable("still down"))  # one that began in silence and lasts
        outage.report(None)
    assert [record.message for record in caplog.records] == [
        "the store failed, the engine recomputes until it is back: down",
        "the store answers again",
        "the store failed, the engine recomputes until it is back (49 more since the last such line): still down",
        "the store answers again",
    ]


def test_a_lack_of_room_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Our own threads may be busy with waiting for the node: "the store answers again" was said of one that hung."""
    outage = Outage()
    for error in (Unavailable("down"), Exhausted("too many lookups"), DeadlineExceeded("late")):
        outage.report(error)
        assert outage.error is not None
    assert "answers again" not in caplog.text


def test_a_refusal_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    for _ in range(5):
        outage.report(InvalidRequest("too large"))
    assert [record.message for record in caplog.records] == ["the store refused a request: too large"]
    assert outage.error is None
