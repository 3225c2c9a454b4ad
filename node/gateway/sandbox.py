"""Give up the rights that a gateway does not need after its start.

An attacker who takes it over through a fault in gRPC gets neither the files of the node's user, nor
the node's memory, nor the network.

    files      Landlock   read Python's and shared libraries' directories; write nothing
               seccomp    change no modes, owners, times and attributes
    network    Landlock   listen on the gRPC port (over IPv6 also on one that the system chooses)
               seccomp    no connect, no TCP Fast Open; only TCP sockets
    processes  both       trace and signal no other process
               seccomp    change no other's limits, priority or processors; run no programs

Still possible: names, sizes and times of files, memory and CPU time, and new processes under the
same rules.

seccomp filters system calls that Landlock does not restrict. A CPU time limit (`prlimit`) kills
another process; a changed mode makes the node refuse its identities file. Refused calls fail with
EPERM.

Both mechanisms restrict the calling thread and its later threads, so call `enter` before there are
other threads.
"""

import contextlib
import ctypes
import logging
import os
import struct
import sys
from collections.abc import Iterable, Sequence

log = logging.getLogger(__name__)

# Linux's numbers, the same on all its platforms (linux/landlock.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1 << 0  # flag of _CREATE_RULESET: return the supported version
_PATH_BENEATH, _NET_PORT = 1, 2
_NO_NEW_PRIVILEGES = 38  # of prctl
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_FILES_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_BIND, _CONNECT = 1 << 0, 1 << 1  # TCP, from version 4 on
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1  # of other processes, from version 6 on
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
# Files that gRPC, the C library and log timestamps need.
_SYSTEM = ("/dev/urandom", "/dev/null", "/sys/devices/system/cpu", "/proc/self", "/etc/localtime")

_libc = ctypes.CDLL(None, use_errno=True)

# Linux's numbers for a filter of system calls (linux/seccomp.h, linux/bpf_common.h).
_SET_SECCOMP, _FILTER = 22, 2  # of prctl
# Offsets in seccomp_data; the low half of each argument comes first
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # 1: EPERM
# Opcodes of BPF
_LOAD, _AND, _EQUALS, _AT_LEAST, _ANY_BIT, _RETURN = (
    0x20,
    0x54,
    0x15,
    0x35,
    0x45,
    0x06,
)
_X32 = 0x40000000  # numbers from here on belong to another ABI of x86-64
_MSG_FASTOPEN = 0x20000000
_AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_TYPE_BITS, _IPPROTO_TCP = 2, 10, 1, 0xF, 6

# By the machine's name: its number (AUDIT_ARCH) and the numbers of its system calls.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_TGKILL = {"x86_64": 234, "aarch64": 131}
# sendto, sendmsg, sendmmsg, and the index of their argument with the flags.
_SENDS = {"x86_64": {44: 3, 46: 2, 307: 3}, "aarch64": {206: 3, 211: 2, 269: 3}}
_REFUSED = {
    "connect": (42, 203),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "execve": (59, 221),
    "execveat": (322, 281),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "io_uring_setup": (425, 425),  # io_uring makes calls past any filter
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def enter(port: int, ipv6: bool = False) -> int:
    """Give up all rights but those above.

    Return the version of Landlock; 0 if the system has none. Raises OSError.

    `ipv6`: keep the right to bind to a free port, which gRPC needs to detect IPv6.
    """
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    version = _enter_landlock((port, 0) if ipv6 else (port,))
    refuse_others()
    return version


def _enter_landlock(ports: Iterable[int]) -> int:
    """Restrict files, ports and other processes as far as this version of Landlock can.

    Return the version.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return 0
    files = _FILES_BY_VERSION[max(known for known in _FILES_BY_VERSION if known <= version)]
    network = _BIND | _CONNECT if version >= 4 else 0
    scope = _ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scope)
    # The kernel refuses unknown fields unless they are 0, so all three can always be passed.
    ruleset = _checked(
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    )
    try:
        for path in _readable(sys.path):
            with contextlib.suppress(OSError):  # it does not exist
                _allow_reading(ruleset, path)
        for port in ports if network else ():
            rule = struct.pack("=QQ", _BIND, port)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _NET_PORT, rule, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return int(version)


def _readable(paths: Iterable[str]) -> list[str]:
    """Return the paths that Python, its packages, libraries and gRPC must read."""
    return [
        path
        for path in dict.fromkeys((*paths, sys.prefix, sys.base_prefix, *_LIBRARIES, *_SYSTEM))
        if path
    ]


def _allow_reading(ruleset: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_directory = os.path.isdir(path)
        rights = _READ_FILE | _EXECUTE | (_READ_DIR if is_directory else 0)
        _checked(
            _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
        )
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    """Return the result of a system call.

    Raises OSError if it failed.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def refuse_others() -> bool:
    """Install the filter.

    Return False on a machine without a table of numbers. Raises OSError. Needs `no_new_privs`.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    program = b"".join(
        struct.pack("=HBBI", *instruction) for instruction in _program(machine, os.getpid())
    )
    code = ctypes.create_string_buffer(program, len(program))
    loaded = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_SECCOMP, _FILTER, loaded, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def _program(machine: str, pid: int) -> list[_Instruction]:
    """Return the filter for this kind of machine.

    `pid`: of this process, which may signal itself.
    """
    column = list(_ARCHITECTURES).index(machine)
    program = [_load(_ARCHITECTURE), *_unless(_EQUALS, _ARCHITECTURES[machine]), _load(_NUMBER)]
    if machine == "x86_64":
        program += _if(_AT_LEAST, _X32)
    for numbers in _REFUSED.values():
        if numbers[column] is not None:
            program += _if(_EQUALS, numbers[column] or 0)
    program += _of(_SOCKET[machine], _only_tcp())
    program += _of(_PRLIMIT[machine], [_argument(0), *_unless(_EQUALS, 0)])  # 0: this process
    program += _of(_TGKILL[machine], [_argument(0), *_unless(_EQUALS, pid)])
    for number, flags in _SENDS[machine].items():
        program += _of(number, [_argument(flags), *_if(_ANY_BIT, _MSG_FASTOPEN)])
    return [*program, _return(_ALLOW)]


def _only_tcp() -> list[_Instruction]:
    """Return checks of the arguments of `socket`: family, type and protocol."""
    families = [
        _argument(0),
        (_EQUALS, 2, 0, _AF_INET),
        (_EQUALS, 1, 0, _AF_INET6),
        _return(_REFUSE),
    ]
    kind = [_argument(1), (_AND, 0, 0, _SOCK_TYPE_BITS), *_unless(_EQUALS, _SOCK_STREAM)]
    protocol = [_argument(2), (_EQUALS, 2, 0, 0), (_EQUALS, 1, 0, _IPPROTO_TCP), _return(_REFUSE)]
    return [*families, *kind, *protocol]


def _load(at: int) -> _Instruction:
    return _LOAD, 0, 0, at


def _argument(index: int) -> _Instruction:
    return _load(_ARGUMENTS + 8 * index)


def _return(value: int) -> _Instruction:
    return _RETURN, 0, 0, value


def _if(test: int, value: int) -> list[_Instruction]:
    """Refuse the call if the test of the last loaded value is true."""
    return [(test, 0, 1, value), _return(_REFUSE)]


def _unless(test: int, value: int) -> list[_Instruction]:
    """Refuse the call if the test is false."""
    return [(test, 1, 0, value), _return(_REFUSE)]


def _of(number: int, checks: Sequence[_Instruction]) -> list[_Instruction]:
    """Apply checks to one system call, and allow it if it passes.

    Its number was loaded last.
    """
    return [(_EQUALS, 0, len(checks) + 1, number), *checks, _return(_ALLOW)]
