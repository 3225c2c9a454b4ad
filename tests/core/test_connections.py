"""When a connection may be used again after what was said on it, and by which name its
end is told.
"""

import pytest

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, ProtocolError, Unavailable
from kvstore.transports.connections import ConnectionPool, Refused


class Connection:
    """Nobody is at the other end."""

    quiet, closed, holds = True, False, False

    def arm(self, seconds: float) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "told", "again"),
    [
        (None, None, True),
        (Refused(Exhausted("full")), Exhausted, True),
        (Refused(ProtocolError("nonsense")), ProtocolError, False),  # the node hangs up after it
        (ProtocolError("nonsense"), ProtocolError, False),
        (TimeoutError(), DeadlineExceeded, False),
        (ConnectionResetError(), Unavailable, False),
        (KeyboardInterrupt(), KeyboardInterrupt, False),
    ],
    ids=["well", "refused", "not understood", "nonsense", "late", "gone", "interrupted"],
)
def test_a_connection_is_used_again_if_it_is_known_what_its_next_bytes_are(
    error: BaseException | None, told: type[BaseException] | None, again: bool
) -> None:
    pool = ConnectionPool[Connection]("there", lambda deadline: Connection(), 1)  # type: ignore[type-var]
    lease = pool.lease(Deadline(5.0))

    def talk() -> None:
        with lease:
            if error is not None:
                raise error

    if told is None:
        talk()
    else:
        with pytest.raises(told):
            talk()
    lease.end()
    assert lease.connection.closed != again
    assert (pool.lease(Deadline(5.0)).connection is lease.connection) == again


def test_a_connection_that_may_hold_slots_is_not_used_again() -> None:
    """Interrupts came before the node was told that it does not: it would refuse the next call."""
    on_close: list[Connection] = []
    pool = ConnectionPool[Connection]("there", lambda deadline: Connection(), 1, on_close.append)  # type: ignore[type-var]
    lease = pool.lease(Deadline(5.0))
    with lease as connection:
        connection.holds = True
    lease.end()
    assert connection.closed
    assert on_close == [connection]
    assert pool.lease(Deadline(5.0)).connection is not connection


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimeoutError(), DeadlineExceeded),
        (OSError(), Unavailable),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_why_there_is_no_connection_is_told_by_our_names_and_its_place_is_free(
    error: Exception, told: type[Exception]
) -> None:
    made: list[Connection] = []

    def connect(deadline: Deadline) -> Connection:
        made.append(Connection())
        if len(made) == 1:
            raise error
        return made[-1]

    pool = ConnectionPool[Connection]("there", connect, 1)  # type: ignore[type-var]
    with pytest.raises(told):
        pool.lease(Deadline(5.0))
    assert pool.lease(Deadline(5.0)).connection is made[1]
