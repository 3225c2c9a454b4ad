"""The runner of checks: a failing or hanging check does not stop the others."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.doctor.checks import ABREAST, Check, Finding, FindingState, ok, one, run_all
from kvstore.errors import Unauthenticated

LONG_S = 60.0


def test_hanging_check_is_abandoned_with_its_findings() -> None:
    ended = threading.Event()

    def hang() -> Iterator[Finding]:
        yield ok("first", "there")
        ended.wait(LONG_S)

    found = run_all([Check("hangs", hang, 0.1), one("works", lambda: ok("works", "well"), LONG_S)])
    ended.set()
    assert [(finding.name, finding.state) for finding in found] == [
        ("first", FindingState.OK),
        ("hangs", FindingState.FAIL),
        ("works", FindingState.OK),
    ]
    assert "did not end within 0.1 s" in found[1].found


def test_expected_and_unexpected_errors_are_findings() -> None:
    def refused() -> Finding:
        raise Unauthenticated("nobody is known by this token")

    def broken() -> Finding:
        raise ZeroDivisionError("by zero")

    found = run_all([one("refused", refused, LONG_S), one("broken", broken, LONG_S)])
    assert [finding.state for finding in found] == [FindingState.FAIL, FindingState.FAIL]
    assert "KVSTORE_TOKEN_FILE" in found[0].remedy
    assert "the check itself failed: ZeroDivisionError: by zero" in found[1].found


def test_findings_are_in_the_order_of_the_checks_and_name_their_member() -> None:
    later = threading.Event()

    def first() -> Finding:
        later.wait(LONG_S)
        return ok("first", "ended last")

    def second() -> Finding:
        later.set()
        return ok("second", "ended first")

    checks = [one("first", first, LONG_S)._replace(of="n1"), one("second", second, LONG_S)]
    assert [(finding.of, finding.name) for finding in run_all(checks)] == [
        ("n1", "first"),
        ("", "second"),
    ]


def test_limited_number_of_checks_runs_at_a_time() -> None:
    lock, now, most = threading.Lock(), [0], [0]
    full = threading.Event()

    def count() -> Finding:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == ABREAST:
                full.set()
        full.wait(LONG_S)
        with lock:
            now[0] -= 1
        return ok("one", "of many")

    progress: list[float] = []
    assert len(run_all([one("one", count, LONG_S)] * 3 * ABREAST, progress.append)) == 3 * ABREAST
    assert most[0] == ABREAST
    assert progress[-1] == 3 * ABREAST


def test_interrupt_ends_the_checks_at_once() -> None:
    ended = threading.Event()

    def tick(done: float) -> None:
        raise KeyboardInterrupt

    def hang() -> Finding:
        ended.wait(LONG_S)
        return ok("hangs", "")

    with pytest.raises(KeyboardInterrupt):
        run_all([one("hangs", hang, LONG_S)], tick)
    ended.set()
