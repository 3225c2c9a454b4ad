"""When a pooled connection may be used again, and which errors its end raises."""

import pytest

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, ProtocolError, Unavailable
from kvstore.transports.connections import ConnectionPool, Refused


class Connection:
    """A fake connection without a peer."""

    quiet, closed, holds = True, False, False

    def arm(self, seconds: float) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "raised", "again"),
    [
        (None, None, True),
        (Refused(Exhausted("full")), Exhausted, True),
        (
            Refused(ProtocolError("nonsense")),
            ProtocolError,
            False,
        ),  # after which the node closes the connection
        (ProtocolError("nonsense"), ProtocolError, False),
        (TimeoutError(), DeadlineExceeded, False),
        (ConnectionResetError(), Unavailable, False),
        (KeyboardInterrupt(), KeyboardInterrupt, False),
    ],
    ids=["well", "refused", "not understood", "nonsense", "late", "gone", "interrupted"],
)
def test_connection_is_reused_only_if_its_state_is_known(
    error: BaseException | None, raised: type[BaseException] | None, again: bool
) -> None:
    pool = ConnectionPool[Connection]("there", lambda deadline: Connection(), 1)  # type: ignore[type-var]
    lease = pool.lease(Deadline(5.0))

    def talk() -> None:
        with lease:
            if error is not None:
                raise error

    if raised is None:
        talk()
    else:
        with pytest.raises(raised):
            talk()
    lease.end()
    assert lease.connection.closed != again
    assert (pool.lease(Deadline(5.0)).connection is lease.connection) == again


def test_connection_that_may_hold_slots_is_not_reused() -> None:
    """An interrupt came before the release, so that the node would refuse the next call."""
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
    ("error", "raised"),
    [
        (TimeoutError(), DeadlineExceeded),
        (OSError(), Unavailable),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_failed_connect_raises_a_kvstore_error_and_frees_its_place(
    error: Exception, raised: type[Exception]
) -> None:
    made: list[Connection] = []

    def connect(deadline: Deadline) -> Connection:
        made.append(Connection())
        if len(made) == 1:
            raise error
        return made[-1]

    pool = ConnectionPool[Connection]("there", connect, 1)  # type: ignore[type-var]
    with pytest.raises(raised):
        pool.lease(Deadline(5.0))
    assert pool.lease(Deadline(5.0)).connection is made[1]
