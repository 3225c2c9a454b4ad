"""Ports for processes that are told theirs before they start."""

import contextlib
import random
import socket

# Below those that a system gives to whoever connects, or asks for any (Linux: from 32768 on): one
# of these that was free a moment ago still is.
GIVEN_BY_NOBODY = range(20_000, 30_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many that nobody listens at.

    Raises OSError if there are not.
    """
    numbers = random.SystemRandom().sample(GIVEN_BY_NOBODY, len(GIVEN_BY_NOBODY))
    found: list[int] = []
    for port in numbers:
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            found.append(port)
    raise OSError(
        f"{len(found)} of {count} ports of {host} from {GIVEN_BY_NOBODY.start} on are free"
    )


def free_port(host: str = "127.0.0.1") -> int:
    """One of them."""
    return free_ports(1, host)[0]
