"""Give up the rights that a gateway does not need after its start.

Whoever takes it over by a fault in gRPC gets neither the files of the node's user, nor the node's memory, nor the
network.

    files    read below the directories of Python and of shared libraries; write nothing     Landlock
    network  listen on the gRPC port (over IPv6 also on one that the system chooses)         Landlock
             connect to nobody                                                               node.gateway.syscalls
    others   trace, signal, limit or slow no other process                                   both

Left are names, sizes and times of files, memory and processor time, and new processes under the same rules.

Both mechanisms restrict the calling thread and threads that it starts later, so call `enter` before there are others.
"""

import contextlib
import ctypes
import logging
import os
import struct
import sys
from collections.abc import Iterable

from node.gateway.syscalls import refuse_others

log = logging.getLogger(__name__)

# Linux's numbers, the same on all its platforms (linux/landlock.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1 << 0  # flag of _CREATE_RULESET: which version there is
_PATH_BENEATH, _NET_PORT = 1, 2
_NO_NEW_PRIVILEGES = 38  # of prctl
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_FILES_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_BIND, _CONNECT = 1 << 0, 1 << 1  # TCP, from version 4 on
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1  # of others, from version 6 on
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
# What gRPC, the C library and the time in log lines look at.
_SYSTEM = ("/dev/urandom", "/dev/null", "/sys/devices/system/cpu", "/proc/self", "/etc/localtime")

_libc = ctypes.CDLL(None, use_errno=True)


def enter(port: int, ipv6: bool = False) -> int:
    """Give up all rights but those above. Return the version of Landlock; 0: the system has none. Raise OSError.

    `ipv6`: keep the right to bind to a free port, which gRPC does to find out whether there is IPv6.
    """
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    version = _enter_landlock((port, 0) if ipv6 else (port,))
    refuse_others()
    return version


def _enter_landlock(ports: Iterable[int]) -> int:
    """Restrict files, ports and other processes as far as this version of Landlock can. Return the version."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return 0
    files = _FILES_BY_VERSION[max(known for known in _FILES_BY_VERSION if known <= version)]
    network = _BIND | _CONNECT if version >= 4 else 0
    scope = _ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scope)
    # The kernel refuses fields that it does not know unless they are 0, so all three can always be given.
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in _readable(sys.path):
            with contextlib.suppress(OSError):  # it is not there
                _allow_reading(ruleset, path)
        for port in ports if network else ():
            rule = struct.pack("=QQ", _BIND, port)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _NET_PORT, rule, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return int(version)


def _readable(paths: Iterable[str]) -> list[str]:
    """Return the directories of Python, packages and shared libraries, and the system files that gRPC reads."""
    return [path for path in dict.fromkeys((*paths, sys.prefix, sys.base_prefix, *_LIBRARIES, *_SYSTEM)) if path]


def _allow_reading(ruleset: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_directory = os.path.isdir(path)
        rights = _READ_FILE | _EXECUTE | (_READ_DIR if is_directory else 0)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    """Return the result of a system call. Raise OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
