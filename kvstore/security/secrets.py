"""Read files that hold a secret, check their modes, and find a client's token.

Such a file must be a regular file, closed to others, of limited length. It is named as
`setting=path`, as in errors. Errors never contain its content.

A client is known by its token, which begins with its tenant's name:

    team-a.Yq3...43 characters      of tenant team-a
    Yq3...43 characters             of all tenants
"""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.config import ClientConfig, is_loopback
from kvstore.errors import ConfigError

SECRET_NBYTES_MAX = 4096  # bytes of a file with one secret
DEFAULT_TENANT = "default"
TOKEN_NBYTES_MAX = 1024
_TOKEN = re.compile(r"[!-~]+")  # characters allowed in an HTTP header


def checked_stat(file: str, forbidden: int = 0) -> os.stat_result:
    """Stat a secret's file. Raises ConfigError if its mode has one of the `forbidden` bits."""
    try:
        return _checked(file, forbidden, os.stat(path_of(file)))
    except OSError as error:
        raise _unread(file, error) from error


def stamp(about: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when the file is written, replaced or made readable."""
    return about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_size


def read_guarded(file: str, forbidden: int, nbytes_max: int) -> bytes:
    """Read a secret's whole file, checking the mode of the open file. Raises ConfigError.

    It does not block on a pipe without a writer.
    """
    try:
        with open(path_of(file), "rb", opener=_at_once) as opened:
            _checked(file, forbidden, os.fstat(opened.fileno()))
            content: bytes = opened.read(nbytes_max + 1)
    except OSError as error:
        raise _unread(file, error) from error
    if len(content) > nbytes_max:
        raise ConfigError(f"{file} has more than {nbytes_max} bytes")
    return content


def path_of(file: str) -> str:
    """Return the path in 'setting=path'."""
    return file.partition("=")[2]


def _at_once(path: Any, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _checked(file: str, forbidden: int, about: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{file} is no regular file")
    if about.st_mode & forbidden:
        raise ConfigError(
            f"{file} is open to others (mode {stat.S_IMODE(about.st_mode):04o}); chmod "
            f"{_closing(about.st_mode & forbidden)} {path_of(file)}, or, of a Kubernetes secret, "
            "defaultMode: 0400"
        )
    return about


def _closing(bits: int) -> str:
    """Return the chmod argument that clears mode bits: 0o026 -> 'g-w,o-rw'."""
    shown = stat.filemode(bits)
    letters = {"g": shown[4:7].replace("-", ""), "o": shown[7:].replace("-", "")}
    return ",".join(f"{who}-{some}" for who, some in letters.items() if some)


def _unread(file: str, error: OSError) -> ConfigError:
    return ConfigError(f"{file} can not be read: {error.strerror}")


def write_whole(
    path: Path, content: bytes, mode: int, owner: tuple[int, int] | None = None
) -> None:
    """Replace a file atomically.

    The new file survives a power loss, and never exists with another mode. `owner` is (user,
    group). Raises OSError.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, mode)
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(fd, *owner)
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def token_of(config: ClientConfig) -> str:
    """Read and return the client's token. The ConfigError never contains the token."""
    token = config.token
    if config.token_file:
        content = read_guarded(f"token_file={config.token_file}", stat.S_IROTH, SECRET_NBYTES_MAX)
        token = content.decode("ascii", "replace").strip()
    if token and (len(token) > TOKEN_NBYTES_MAX or not _TOKEN.fullmatch(token)):
        raise ConfigError(f"the token is no word of 1 to {TOKEN_NBYTES_MAX} characters of ASCII")
    return token


def tenant_of(config: ClientConfig) -> str:
    """Return a client's tenant: the configured one, else its token's, else "default".

    Programs and all adapters use this. With a client certificate, configure the tenant. It may
    differ from the token's, because tenants can share namespaces; otherwise the node refuses it
    with an error that names both. Raises ConfigError if the tenant must come from a token that can
    not be read.
    """
    if config.tenant:
        return config.tenant
    tenant, dot, _ = token_of(config).partition(".")
    return tenant if dot and tenant else DEFAULT_TENANT


def check_stays_private(token: str, config: ClientConfig, addresses: Sequence[str]) -> None:
    """Raise ConfigError for a token that would cross a network unencrypted."""
    if token and not (config.tls_ca or config.insecure) and not all(map(is_loopback, addresses)):
        raise ConfigError(
            "a token would cross the network unencrypted; set tls_ca (KVSTORE_TLS_CA), or "
            "insecure if that is intended"
        )
