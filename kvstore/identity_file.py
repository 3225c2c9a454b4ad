"""Changes to the file of identities: a line more, or one less. A node takes it up within a second or two.

The file is replaced as a whole, so that nobody reads half of it; comments and the lines of others stay as they are.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identities import ALL, Identities, parse, token_hash
from kvstore.whole_file import write_whole

MODE_NEW = 0o640
SECRET_NBYTES = 32


def new_token(tenant: str) -> str:
    """256 random bits behind the tenant's name, by which a client knows whose namespaces to open."""
    secret = secrets.token_urlsafe(SECRET_NBYTES)
    return secret if tenant == ALL else f"{tenant}.{secret}"


def token_line(name: str, token: str, **fields: str) -> str:
    return _line("token", name, hash=token_hash(token).hex(), **fields)


def certificate_line(name: str, **fields: str) -> str:
    return _line("certificate", name, **fields)


def _line(kind: str, name: str, **fields: str) -> str:
    """Raises InvalidRequest for what would not be one, or not be valid."""
    line = " ".join([kind, name, *(f"{field}={value}" for field, value in fields.items() if value)])
    found = parse(line)
    if found.problems or len(found.tokens) + len(found.certificates) != 1 or "#" in line:
        why = found.problems[0].partition(": ")[2] if found.problems else "a name has no spaces and no #"
        raise InvalidRequest(f"this can not be an identity: {why}")
    return line


def read(path: Path) -> Identities:
    """Raises ConfigError."""
    return parse(_text(path))


def add(path: Path, line: str, tell: Callable[[], object] = lambda: None) -> None:
    """Begins the file if there is none. `tell` is called before it is written, when the line may be added: what it
    raises leaves the file as it was. Raises InvalidRequest if its kind has this name already, and ConfigError."""
    kind, name = line.split()[:2]
    with _replaced(path) as lines:
        if any(some.split()[:2] == [kind, name] for some in lines):
            raise InvalidRequest(f"{path} has a {kind} named {name} already; revoke it first, or take another name")
        tell()
        lines.append(line)


def revoke(path: Path, name: str) -> int:
    """How many lines went: tokens and certificates of this name. Raises ConfigError."""
    with _replaced(path) as lines:
        kept = [line for line in lines if line.split()[:2] not in (["token", name], ["certificate", name])]
        count = len(lines) - len(kept)
        lines[:] = kept
    return count


def _text(path: Path) -> str:
    """As a node reads it: only a line feed ends a line, so what a comment hides stays hidden."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from error


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[list[str]]:
    """Its lines, to be changed; one at a time. Of a link, those of the file that it leads to: a node may read
    it by its own name."""
    path = Path(os.path.realpath(path))
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path.parent} can not be opened: {error.strerror}") from error
    try:
        with _writing(path):
            fcntl.flock(directory, fcntl.LOCK_EX)
            there = path.exists()
        before = _text(path).split("\n") if there else []
        if before and not before[-1]:  # what stands behind the last line's end
            before.pop()
        lines = list(before)
        yield lines
        if lines != before:
            with _writing(path):
                _write(path, lines, os.stat(path) if there else None)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can not be written: {error.strerror}") from error


def _write(path: Path, lines: list[str], about: os.stat_result | None) -> None:
    """With the mode and owner that it had."""
    content = "".join(f"{line}\n" for line in lines).encode()
    if about is None:
        write_whole(path, content, MODE_NEW)
    else:
        write_whole(path, content, about.st_mode & 0o7777, (about.st_uid, about.st_gid))
