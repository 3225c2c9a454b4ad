"""Copies between callers' buffers and the arena: the bytes that are hashed, and the step length."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.buffers import copying
from kvstore.checksum import leaves
from kvstore.transports import shm
from kvstore.transports.shm import CROWDED_BELOW, STEP_NBYTES, _Pace, _read_page, _write_page

NBYTES = 4 * STEP_NBYTES
Copying = Callable[
    [memoryview, memoryview], contextlib.AbstractContextManager[Callable[[int, int], None]]
]


def changing_the_source(owner: bytearray) -> Copying:
    """Return a `copying` after each piece of which the source, `owner`, is changed."""

    @contextlib.contextmanager
    def changed(target: memoryview, source: memoryview) -> Iterator[Callable[[int, int], None]]:
        with copying(target, source) as copy_piece:

            def copy_and_change(start: int, end: int) -> None:
                copy_piece(start, end)
                owner[start] ^= 1

            yield copy_and_change

    return changed


def test_page_changed_during_a_put_fails_its_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot has a mix of old and new bytes, which a hash of the slot would make valid."""
    page, slot = bytearray(os.urandom(NBYTES)), memoryview(bytearray(NBYTES))
    monkeypatch.setattr(shm, "copying", changing_the_source(page))
    assert _write_page(slot, (memoryview(page),)) != leaves(slot)


def test_read_checksum_covers_the_callers_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds even if the slot changes during the copy."""
    slot, buffer = bytearray(os.urandom(NBYTES)), memoryview(bytearray(NBYTES))
    stored = bytes(slot)
    monkeypatch.setattr(shm, "copying", changing_the_source(slot))
    assert (
        _read_page((buffer,), [memoryview(slot).toreadonly()]) == leaves(buffer) == leaves(stored)
    )
    assert buffer == stored != slot


def test_steps_are_short_and_leave_no_small_rest() -> None:
    pace = _Pace()
    for nbytes in (1, STEP_NBYTES, 2 * STEP_NBYTES - 1):
        assert pace.end_of_step(0, nbytes) == nbytes
    assert pace.end_of_step(0, 2 * STEP_NBYTES) == STEP_NBYTES
    assert pace.end_of_step(STEP_NBYTES, 3 * STEP_NBYTES - 1) == 3 * STEP_NBYTES - 1


@pytest.mark.parametrize("nbytes", [STEP_NBYTES, 64 * STEP_NBYTES])
def test_slow_step_makes_the_next_one_the_whole_rest(nbytes: int) -> None:
    pace, quick = _Pace(), nbytes / CROWDED_BELOW
    pace.took(nbytes, quick * 1.1)
    assert pace.end_of_step(STEP_NBYTES, 64 * STEP_NBYTES) == 64 * STEP_NBYTES
    pace.took(nbytes, quick * 0.9)
    assert pace.end_of_step(STEP_NBYTES, 64 * STEP_NBYTES) == 2 * STEP_NBYTES


def test_busy_thread_causes_fewer_and_longer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake clock advances by 5 ms per reading, as beside a thread that computes."""
    pieces: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def recorded(target: memoryview, source: memoryview) -> Iterator[Callable[[int, int], None]]:
        yield lambda start, end: pieces.append((start, end))

    clock = iter(range(1000))
    monkeypatch.setattr(shm, "copying", recorded)
    monkeypatch.setattr(shm, "_pace", _Pace())
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 0.005)
    page = memoryview(bytearray(NBYTES))
    _write_page(page, (page,))
    assert pieces == [(0, STEP_NBYTES), (STEP_NBYTES, NBYTES)]
    pieces.clear()
    _write_page(page, (page,))
    assert pieces == [(0, NBYTES)]
