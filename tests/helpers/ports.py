"""Free ports for processes that must know their port before they start."""

import contextlib
import random
import socket

# Below the ephemeral ports (Linux: from 32768 on), so that no outgoing connection takes a port that
# was found free.
BELOW_EPHEMERAL = range(20_000, 30_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports that no process listens at.

    Raises OSError if there are not enough.
    """
    numbers = random.SystemRandom().sample(BELOW_EPHEMERAL, len(BELOW_EPHEMERAL))
    found: list[int] = []
    for port in numbers:
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            found.append(port)
    raise OSError(
        f"{len(found)} of {count} ports of {host} from {BELOW_EPHEMERAL.start} on are free"
    )


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process listens at."""
    return free_ports(1, host)[0]
