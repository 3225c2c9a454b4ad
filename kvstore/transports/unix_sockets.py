"""Identify the peer of a Unix socket, and send descriptors with frames."""

import array
import os
import socket
import stat
import struct
from typing import NamedTuple

from kvstore.config import PATH_NBYTES_MAX, PROTOCOL_VERSION, runtime_dir
from kvstore.errors import ConfigError
from kvstore.transports.frames import FrameSocket, pack_fixed, timeval

_UCRED = struct.Struct("@iII")
_FD_NBYTES = array.array("i").itemsize


class Peer(NamedTuple):
    """The process at the other end, as it was when it connected.

    `pid` is 0 if it is in a container whose processes can not be seen from here.
    """

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process and user at the other end of a Unix socket."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def check_path(path: str, setting: str) -> None:
    """Raise ConfigError if no Unix socket can have this path."""
    nbytes = len(os.fsencode(path))
    if nbytes > PATH_NBYTES_MAX:
        raise ConfigError(
            f"{setting}={path!r} has {nbytes} bytes; a Unix socket's path has at most "
            f"{PATH_NBYTES_MAX}, choose a shorter directory"
        )
    if not os.path.isabs(path):
        raise ConfigError(f"{setting}={path!r} must be an absolute path")


def private_directory() -> str:
    """Return `runtime_dir()`, created if missing, where nobody but this user may write.

    In /tmp another user could have created it to plant a socket. Raises OSError.
    """
    directory, uid = runtime_dir(), os.geteuid()
    above = os.path.dirname(directory)
    wanted = "unset XDG_RUNTIME_DIR, or set it to a directory of this user"
    try:
        place = os.stat(above)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{above} does not exist: {wanted}, or keep it over a logout (loginctl enable-linger)"
        ) from None
    # As after `su`; that user's own programs would find ours in the way. A sticky /tmp is for all,
    # and in some containers nobody's.
    if place.st_uid not in (uid, 0) and not place.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{above} belongs to uid {place.st_uid}, not to {uid}: {wanted}")
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
            raise PermissionError(
                f"{directory} is not a directory that only uid {uid} may write to: remove it, or "
                "set XDG_RUNTIME_DIR to another"
            ) from None
    except OSError as error:  # as of root's after `su`
        raise OSError(f"{directory} can not be made: {error.strerror}: {wanted}") from error
    return directory


def remove_stale(path: str) -> None:
    """Remove the socket that a killed process left behind.

    Raises OSError if a process listens there, or for another file.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog means that a process listens
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise FileExistsError(f"another process listens on {path}")


def connected(path: str, seconds: float) -> socket.socket:
    """Connect to a Unix socket. Raises TimeoutError if the listener does not accept in time.

    The kernel waits, because the socket is blocking. With Python's own timeout a connection is
    refused at once while the listener's backlog is full, as when many clients connect to a healthy
    node.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(seconds))
        sock.connect(path)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(f"{path} took no connection in {seconds:g} s") from error
    except BaseException:
        sock.close()
        raise
    return sock


class DescriptorSocket(FrameSocket):
    """A connected Unix stream socket.

    A frame may carry one descriptor, on its first byte.
    """

    def __init__(self, sock: socket.socket, version: int = PROTOCOL_VERSION) -> None:
        super().__init__(sock, version)
        self.peer = peer_of(sock)

    def send_frame_with(self, fd: int, header: bytes) -> None:
        """Send a frame without payload and a copy of `fd`, which stays the caller's."""
        frame = pack_fixed(len(header), 0, self.version) + header
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sent = 0
        # The descriptor goes with the first byte, so only a first byte is waited for here
        while not sent:
            self._check_deadline("send")
            try:
                sent = self._sock.sendmsg([frame], rights)
            except BlockingIOError:
                pass
        self.send(frame[sent:])

    def recv_frame_with(self, header_nbytes_max: int) -> tuple[bytes, int, int | None]:
        """Return (header, payload_nbytes, fd); the caller closes a descriptor that came.

        No other method accepts one: `recv_frame` has no space for any, and the kernel closes those.
        """
        assert not self._early.nbytes, "a descriptor comes with the first byte of a frame"
        while True:
            self._check_deadline("receive")
            try:
                # CMSG_LEN and not CMSG_SPACE: the padding of the latter would take a second
                # descriptor.
                data, rights, _, _ = self._sock.recvmsg(
                    self._ahead.nbytes, socket.CMSG_LEN(_FD_NBYTES), socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                pass
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        self._ahead[: len(data)] = data
        self._early = self._ahead[: len(data)]
        fds = array.array("i")
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // _FD_NBYTES * _FD_NBYTES])
        try:
            header, payload_nbytes = self._recv_header(header_nbytes_max)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return header, payload_nbytes, fds[0] if fds else None
