"""Outages in the log: begin and end, not every request."""

import logging

import pytest

from gpu_agent.outage import Outage
from kvstore import DeadlineExceeded, InvalidRequest, Unavailable


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


def test_a_refusal_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    for _ in range(5):
        outage.report(InvalidRequest("too large"))
    assert [record.message for record in caplog.records] == ["the store refused a request: too large"]
    assert outage.error is None
