"""The file of a Unix socket: made for its owner only, replaced if its node is dead, removed at the end."""

import os
import socket
import stat

from kvstore.config import runtime_dir
from kvstore.wires.unix_sockets import check_path


def default_path(port: int) -> str:
    """A path in a directory that is this user's alone, made if need be. Raises OSError, or ConfigError
    if the path is too long.

    In /tmp anybody may have made a directory of that name, to put a socket of his own there.
    """
    directory = runtime_dir()
    path = f"{directory}/{port}.sock"
    check_path(path, "shm_socket=auto, which is")
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{directory} is not a directory that only uid {os.geteuid()} may write to") from None
    return path


def listen_on(path: str, backlog: int) -> socket.socket:
    """A listening socket that only its owner, and root, can connect to. Raises OSError, also if a
    process listens there already."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before `listen`, so nobody can be quicker
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """A node that was killed leaves its file behind; nobody listens on it any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{path} is there and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog is somebody's, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise FileExistsError(f"another process listens on {path}")
