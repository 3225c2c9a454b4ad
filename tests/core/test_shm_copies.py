"""Pages between callers' buffers and the arena, step by step: of which bytes the checksum is, how
long a step is.
"""

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
    """`copying` whose source, `owner`, is changed by somebody right behind each piece."""

    @contextlib.contextmanager
    def changed(target: memoryview, source: memoryview) -> Iterator[Callable[[int, int], None]]:
        with copying(target, source) as copy_piece:

            def copy_and_change(start: int, end: int) -> None:
                copy_piece(start, end)
                owner[start] ^= 1

            yield copy_and_change

    return changed


def test_a_page_that_its_writer_changes_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot has neither the old page nor the new one: who hashed the slot would vouch
    for that.
    """
    page, slot = bytearray(os.urandom(NBYTES)), memoryview(bytearray(NBYTES))
    monkeypatch.setattr(shm, "copying", changing_the_source(page))
    assert _write_page(slot, (memoryview(page),)) != leaves(slot)


def test_the_checksum_of_what_is_read_is_that_of_the_callers_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever becomes of the slot meanwhile."""
    slot, buffer = bytearray(os.urandom(NBYTES)), memoryview(bytearray(NBYTES))
    stored = bytes(slot)
    monkeypatch.setattr(shm, "copying", changing_the_source(slot))
    assert (
        _read_page((buffer,), [memoryview(slot).toreadonly()]) == leaves(buffer) == leaves(stored)
    )
    assert buffer == stored != slot


def test_steps_are_short_where_nobody_waits_and_none_is_a_rest() -> None:
    pace = _Pace()
    for nbytes in (1, STEP_NBYTES, 2 * STEP_NBYTES - 1):
        assert pace.end_of_step(0, nbytes) == nbytes
    assert pace.end_of_step(0, 2 * STEP_NBYTES) == STEP_NBYTES
    assert pace.end_of_step(STEP_NBYTES, 3 * STEP_NBYTES - 1) == 3 * STEP_NBYTES - 1


@pytest.mark.parametrize("nbytes", [STEP_NBYTES, 64 * STEP_NBYTES])
def test_a_step_that_waited_makes_the_next_one_all_that_is_left(nbytes: int) -> None:
    pace, quick = _Pace(), nbytes / CROWDED_BELOW
    pace.took(nbytes, quick * 1.1)
    assert pace.end_of_step(STEP_NBYTES, 64 * STEP_NBYTES) == 64 * STEP_NBYTES
    pace.took(nbytes, quick * 0.9)
    assert pace.end_of_step(STEP_NBYTES, 64 * STEP_NBYTES) == 2 * STEP_NBYTES


def test_beside_a_thread_that_computes_the_gil_is_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time as such a thread makes it pass: 5 ms from one look at the clock to the next."""
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
