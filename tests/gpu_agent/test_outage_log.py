"""Outages in the log: their start and end, not every request."""

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


def test_outage_is_logged_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
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


def test_intermittent_outages_are_logged_rarely(
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
        outage.report(Unavailable("still down"))  # an outage that was not logged at its start
        outage.report(None)
    assert [record.message for record in caplog.records] == [
        "the store failed, the engine recomputes until it is back: down",
        "the store answers again",
        "the store failed, the engine recomputes until it is back (49 more since the last such "
        "line): still down",
        "the store answers again",
    ]


def test_exhausted_queue_does_not_end_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: "the store answers again" was logged for a hung node.

    Our own threads may be busy waiting for it.
    """
    outage = OutageLog()
    for error in (Unavailable("down"), Exhausted("too many lookups"), DeadlineExceeded("late")):
        outage.report(error)
        assert outage.error is not None
    assert "answers again" not in caplog.text


def test_refused_request_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
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
def test_refused_engine_is_logged_once_until_served(
    refusal: KVStoreError, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: every second refusal was logged as the end of an outage.

    Between two refusals the circuit breaker is open.
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


def test_store_that_returns_but_refuses_is_not_logged_as_answering(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    outage = OutageLog(lambda: now[0])
    outage.report(None)
    outage.report(Unavailable("down"))
    for error in (InvalidRequest("too large"), Unauthenticated("who"), Forbidden("not that")):
        outage.report(error)
        assert outage.error is not None, "the outage ended although nothing was served"
    now[0] += OUTAGES_S
    outage.report(Unauthenticated("who"))
    outage.report(None)
    assert lines_of(caplog) == [
        "the store failed, the engine recomputes until it is back: down",
        "the store refused a request: too large",
        f"{REFUSES}who",
        SERVES_AGAIN,
    ]


def test_reader_with_refused_saves_counts_as_served(
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


def test_startup_warning_distinguishes_refusals() -> None:
    assert (
        startup_warning(Unavailable("x"))
        == "the store does not answer yet, the engine starts without it: x"
    )
    for error in (Unauthenticated("x"), Forbidden("x"), ConfigError("x")):
        assert startup_warning(error) == "the store refuses this engine, which starts without it: x"
