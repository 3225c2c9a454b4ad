"""Addresses from which the kernel takes no new connections, for a while: a filter on the socket that listens.

gRPC accepts by itself, and takes calls faster than Python answers them: who connects, calls and hangs up, again and
again, fills its queue of calls, and then it turns away everybody's. Connections that are there stay as they are.
"""

import contextlib
import ctypes
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

BAN_S = 60.0
BANNED_MAX = 64  # addresses at a time; the one that was banned first makes room
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux's, on all its platforms that Python runs on
_INSTRUCTION = struct.Struct("=HBBI")  # of the classic packet filter: operation, two jumps, operand
_PROGRAM = struct.Struct("@HP")  # how many there are, and where
_LOAD, _LOAD_BYTE, _AND, _JUMP, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # in a packet: a listening socket's begins behind it
_SOURCE_V4, _SOURCE_V6 = _IP_HEADER + 12, _IP_HEADER + 8
_DROP, _PASS = 0, 0xFFFFFFFF

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Bans:
    """Thread-safe. `listeners` gives duplicates of the sockets that listen, which are closed here."""

    def __init__(
        self, listeners: Callable[[], list[socket.socket]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listeners = listeners
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}  # by peer, as `node.serve.limits.peer_of` calls it
        self._in_force = True

    def ban(self, peer: str) -> None:
        with self._lock:
            if peer in self._ends or not _network(peer):
                return
            while len(self._ends) >= BANNED_MAX:
                del self._ends[next(iter(self._ends))]
            self._ends[peer] = self._clock() + BAN_S
            self._enforce()
        log.warning("grpc: %s makes connections all the time; no more of it are taken for %g s", peer, BAN_S)

    def look(self) -> None:
        """Now and then: ends what is over, and tries again what could not be done."""
        now = self._clock()
        with self._lock:
            over = [peer for peer, end in self._ends.items() if end <= now]
            for peer in over:
                del self._ends[peer]
            if over or not self._in_force:
                self._enforce()

    def _enforce(self) -> None:
        program = filter_of(filter(None, map(_network, self._ends))) if self._ends else []
        listeners = self._listeners()
        self._in_force = bool(listeners)  # there is no descriptor left to find them
        for listener in listeners:
            with listener:
                try:
                    _set(listener, program)
                except OSError as error:  # in a sandbox that has no filters
                    log.warning("grpc: no address can be banned: %s", error)


def filter_of(networks: Iterable[Network]) -> list[bytes]:
    """A program that drops packets from any of these, IPv4 addresses and IPv6 networks of 64 bits."""
    of_four, of_six = [_instruction(_LOAD, _SOURCE_V4)], []
    for network in networks:
        source, drop = int(network.network_address), _instruction(_RETURN, _DROP)
        if network.version == 4:
            of_four += [_instruction(_IF_EQUAL, source, 0, 1), drop]
        else:
            high, low = source >> 96, source >> 64 & 0xFFFFFFFF
            of_six += [_instruction(_LOAD, _SOURCE_V6), _instruction(_IF_EQUAL, high, 0, 3)]
            of_six += [_instruction(_LOAD, _SOURCE_V6 + 4), _instruction(_IF_EQUAL, low, 0, 1), drop]
    for program in (of_four, of_six):
        program.append(_instruction(_RETURN, _PASS))
    begin = [_instruction(_LOAD_BYTE, _IP_HEADER), _instruction(_AND, 0xF0), _instruction(_IF_EQUAL, 0x40, 0, 1)]
    return [*begin, _instruction(_JUMP, len(of_six)), *of_six, *of_four]


def _instruction(operation: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return _INSTRUCTION.pack(operation, if_so, if_not, operand)


def _network(peer: str) -> Network | None:
    """None: it is no address."""
    try:
        return ipaddress.ip_network(peer)
    except ValueError:
        return None


def _set(listener: socket.socket, program: list[bytes]) -> None:
    if not program:
        with contextlib.suppress(FileNotFoundError):  # it has none: the same socket may have been found twice
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    code = ctypes.create_string_buffer(b"".join(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(len(program), ctypes.addressof(code)))
