"""The watch detects each kind of finding; one that detects nothing would let every input pass."""

import logging
import random
from collections.abc import Callable

import mutations
import pytest
import watched
from registered import TARGETS
from watched import Target, Watch

from kvstore.errors import InvalidRequest

log = logging.getLogger("kvstore.fuzz")


def found(once: Callable[[bytes], None], allowed: tuple[type[Exception], ...] = ()) -> str:
    with Watch() as watch:
        what = watch.run(Target(once, lambda: [b""], allowed), b"data")
    return what.kind if what else ""


def raises(error: BaseException) -> Callable[[bytes], None]:
    def once(data: bytes) -> None:
        raise error

    return once


def test_answers_and_documented_errors_are_no_findings() -> None:
    assert found(lambda data: None) == ""
    assert found(raises(InvalidRequest("no"))) == ""
    assert found(raises(ValueError("no")), (ValueError,)) == ""


@pytest.mark.parametrize(
    "error", [ValueError(), AssertionError(), RecursionError(), OverflowError(), OSError()]
)
def test_any_other_exception_is_a_crash(error: Exception) -> None:
    assert found(raises(error)) == "crash"


def test_logged_internal_error_is_a_crash() -> None:
    def once(data: bytes) -> None:
        try:
            _ = 1 // 0
        except ZeroDivisionError:
            log.exception("failed")
        raise InvalidRequest("failed inside the node")

    assert found(once) == "crash"


def test_slow_input_is_reported_as_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "CPU_S", 0.02)

    def once(data: bytes) -> None:
        while True:
            try:
                sum(range(100))
            except Exception:  # noqa: BLE001 -- as a request handler does
                pass

    assert found(once) == "hang"


def test_failed_or_large_allocation_is_a_memory_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(raises(MemoryError())) == "memory"
    peaks = iter(
        [1 << 20, (1 << 20) + watched.GROWN_NBYTES, (1 << 20) + 2 * watched.GROWN_NBYTES + 1]
    )
    monkeypatch.setattr(watched, "peak_nbytes", lambda: next(peaks))
    with Watch() as watch:
        target = Target(lambda data: None, lambda: [])
        assert watch.run(target, b"") is None
        grown = watch.run(target, b"")
    assert grown is not None
    assert grown.kind == "memory"


def test_resources_left_in_a_node_are_found() -> None:
    target = TARGETS["bulk"]()
    house = next(
        cell.cell_contents
        for cell in target.once.__closure__ or ()
        if hasattr(cell.cell_contents, "node")
    )
    try:
        house.node.service.requests.take("fuzz", 7)
        assert target.check() == ["7 bytes of requests are left"]
        assert target.check() == [], "the check did not start a new node"
    finally:
        target.close()


def test_inputs_are_repeated_by_a_seed() -> None:
    some, again = (mutations.inputs(random.Random(5), [b"seed", b"another"], 64) for _ in range(2))
    made = [next(some) for _ in range(500)]
    assert made == [next(again) for _ in range(500)]
    assert len(set(made)) > 300
    assert max(map(len, made)) <= 64
