"""Outages in the log: begin and end, not every request."""

import logging

import pytest

from gpu_agent.outage_log import OUTAGES_S, OutageLog, startup_warning
from kvstore import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    Unauthenticated,
    Unavailable,
)


def test_an_outage_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog()
    with caplog.at_level(logging.INFO):
        for error in (
            None,
            Unavailable("down"),
            DeadlineExceeded("late"),
            Unavailable("down"),
            None,
            None,
        ):
            outage.report(error)
    assert [record.message for record in caplog.records] == [
        "the store failed, the engine recomputes until it is back: down",
        "the store answers again",
    ]
    assert outage.error is None


def test_a_store_that_fails_and_answers_by_turns_is_told_of_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    outage = OutageLog(lambda: now[0])
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
        "the store failed, the engine recomputes until it is back (49 more since the last such "
        "line): still down",
        "the store answers again",
    ]


def test_a_lack_of_room_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Our own threads may be busy with waiting for the node: "the store answers again" was said of
    one that hung.
    """
    outage = OutageLog()
    for error in (Unavailable("down"), Exhausted("too many lookups"), DeadlineExceeded("late")):
        outage.report(error)
        assert outage.error is not None
    assert "answers again" not in caplog.text


def test_a_refusal_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog()
    for _ in range(5):
        outage.report(InvalidRequest("too large"))
    assert [record.message for record in caplog.records] == [
        "the store refused a request: too large"
    ]
    assert outage.error is None


REFUSES = "the store refuses this engine, which recomputes until it is served: "
SERVES_AGAIN = "the store serves this engine again"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(
    "refusal", [Unauthenticated("who"), ConfigError("no file"), Forbidden("of team-b")], ids=repr
)
def test_a_refused_engine_is_told_of_once_until_a_request_is_served(
    refusal: KVStoreError, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two refusals the breaker is open: every second refusal ended "the outage" of the
    pause before it.
    """
    now = [100.0]
    outage = OutageLog(lambda: now[0])
    for _ in range(50):
        outage.report(refusal)
        outage.report(Unavailable("node-1 failed 3 times, next try in 1.0 s; last: who"))
        assert outage.error is not None
        now[0] += OUTAGES_S
    assert lines_of(caplog) == [f"{REFUSES}{refusal}"]
    outage.report(None)
    outage.report(None)
    assert lines_of(caplog)[1:] == [SERVES_AGAIN]
    assert outage.error is None


def test_a_store_that_comes_back_and_refuses_does_not_answer_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    outage = OutageLog(lambda: now[0])
    outage.report(None)
    outage.report(Unavailable("down"))
    for error in (InvalidRequest("too large"), Unauthenticated("who"), Forbidden("not that")):
        outage.report(error)
        assert outage.error is not None, "nothing was served"
    now[0] += OUTAGES_S
    outage.report(Unauthenticated("who"))
    outage.report(None)
    assert lines_of(caplog) == [
        "the store failed, the engine recomputes until it is back: down",
        "the store refused a request: too large",
        f"{REFUSES}who",
        SERVES_AGAIN,
    ]


def test_a_reader_whose_saves_are_refused_is_served_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    outage = OutageLog(lambda: now[0])
    for _ in range(4):
        outage.report(None)
        outage.report(Forbidden("put asks for write"))
        assert outage.error is None
        now[0] += OUTAGES_S / 2
    assert lines_of(caplog) == ["the store refused a request: put asks for write"] * 2


def test_a_start_without_the_store_says_whether_it_was_refused() -> None:
    assert (
        startup_warning(Unavailable("x"))
        == "the store does not answer yet, the engine starts without it: x"
    )
    for error in (Unauthenticated("x"), Forbidden("x"), ConfigError("x")):
        assert startup_warning(error) == "the store refuses this engine, which starts without it: x"
