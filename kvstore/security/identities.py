"""Read and change the identities file: who may connect, their roles, and shared namespaces.

    token        ci      tenant=team-a role=write models=llama-*,qwen-* hash=<64 hex digits>
    certificate  gpu-7   tenant=team-a role=write expires=2027-01-01T00:00:00Z
    tenant       team-a  ram=40GiB disk=400GiB
    share        team-a  models=prompts-* with=team-b,team-c

One entry per line; `#` begins a comment. A token is the start of a tenant's name and 256 random
bits. The file has its plain SHA-256: 256 bits can not be guessed. Invalid lines are skipped and
reported by their number, never by their content; the others are in force.

A change adds or removes a line. The file is replaced as a whole, so that no reader sees half of it;
comments and other lines stay as they are. A node reloads it within a second or two.
"""

import contextlib
import datetime
import enum
import fcntl
import hashlib
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.security.secrets import read_guarded, write_whole

ALL = "*"  # tenant of an identity of all tenants
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_NAME = re.compile(r"[!-~]{1,255}")  # certificates have all kinds of names
_HASH = re.compile(r"[0-9a-f]{64}")
LINES_MAX = 100_000
MODE_NEW = 0o640  # mode of a new file
SECRET_NBYTES = 32  # random bytes in a token
FILE_NBYTES_MAX = 16 << 20
LOCK_S = 10.0  # wait for another writer; who may read the directory can hold its lock


class Role(enum.IntEnum):
    """Each role may do what those before it may.

    A node may put pages in any tenant's name, because it replicates pages of others.
    """

    READ = 1
    WRITE = 2
    NODE = 3
    ADMIN = 4


ROLES = {role.name.lower(): role for role in Role}


@dataclass(frozen=True)
class Principal:
    """An authenticated client.

    `models`: shell patterns of the models whose namespaces it may use; empty allows all.
    `expires_s`: seconds since 1970.
    """

    name: str
    tenant: str
    role: Role
    models: tuple[str, ...] = ()
    expires_s: float = math.inf

    @property
    def of_all(self) -> bool:
        """Return whether it belongs to all tenants and may use all models."""
        return self.tenant == ALL and not self.models

    def owns(self, tenant: str, model: str) -> bool:
        """Return whether a namespace of this tenant and model is its own."""
        return self.tenant in (ALL, tenant) and matches(model, self.models)

    @property
    def scope(self) -> tuple[str, tuple[str, ...]]:
        """Return a key that is equal for principals that may see the same namespaces."""
        return self.tenant, self.models

    @property
    def share(self) -> str:
        """Return the tenant that its usage counts to; empty: its address counts instead."""
        return "" if self.tenant == ALL else share_of(self.tenant)


def share_of(tenant: str) -> str:
    """Return the name by which limits count a tenant's usage, from all addresses together."""
    return f"tenant {tenant}"


def matches(model: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a model matches one of the shell patterns, or there are none."""
    return not patterns or any(fnmatchcase(model, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Share:
    """Namespaces of a tenant that others may read."""

    tenant: str
    models: tuple[str, ...]
    others: tuple[str, ...]

    def lets(self, principal: Principal, tenant: str, model: str) -> bool:
        """Return whether it lets a principal use a namespace of this tenant and model."""
        others = ALL in self.others or principal.tenant in self.others
        return (
            tenant == self.tenant
            and others
            and matches(model, self.models)
            and matches(model, principal.models)
        )


@dataclass
class Identities:
    """Content of an identities file. `problems`: a sentence for each line that was skipped.

    `quotas`: the settings of each tenant, as text. `whole`: whether the last line ends with a line
    feed. `digest`: SHA-256 of the file's bytes, if it was read from one.
    """

    tokens: dict[bytes, Principal] = field(default_factory=dict)
    certificates: dict[str, Principal] = field(default_factory=dict)
    quotas: dict[str, dict[str, str]] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    whole: bool = True
    digest: bytes = b""

    @property
    def count(self) -> int:
        """Return how many identities the file names."""
        return len(self.tokens) + len(self.certificates)

    @property
    def names(self) -> set[str]:
        """Return the names of all identities."""
        known = (*self.tokens.values(), *self.certificates.values())
        return {principal.name for principal in known}

    @cached_property
    def tenant_count(self) -> int:
        """Return how many tenants the file names."""
        known = (*self.tokens.values(), *self.certificates.values())
        return len({principal.tenant for principal in known} - {ALL})


def token_hash(token: str) -> bytes:
    """Return the SHA-256 of a token, as the identities file stores it."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


def parse(
    text: str, check_quota: Callable[[Mapping[str, str]], object] = lambda fields: None
) -> Identities:
    """Parse the text of an identities file.

    `check_quota` raises ConfigError for invalid quota fields.
    """
    found = Identities(whole=text.endswith("\n"))
    seen: dict[tuple[str, str], int] = {}
    lines = text.split("\n", LINES_MAX)
    for number, line in enumerate(lines[:LINES_MAX], 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            _take(found, words, check_quota, seen, number)
        except ConfigError as error:
            found.problems.append(f"line {number}: {error}")
    if len(lines) > LINES_MAX and lines[LINES_MAX]:
        found.problems.append(
            f"line {LINES_MAX + 1} and those behind it: a file has {LINES_MAX} lines at most"
        )
    return found


def _take(
    found: Identities,
    words: list[str],
    check_quota: Callable[[Mapping[str, str]], object],
    seen: dict[tuple[str, str], int],
    number: int,
) -> None:
    if len(words) < 2 or words[0] not in ("token", "certificate", "tenant", "share"):
        raise ConfigError("begin it with token, certificate, tenant or share, and a name")
    kind, name = words[:2]
    fields = _fields(words[2:])
    if kind == "share":
        found.shares.append(_share(name, fields))
        return
    if (kind, name) in seen:
        raise ConfigError(f"its name stands in line {seen[kind, name]} already")
    if kind == "tenant":
        _check_tenant(name)
        check_quota(fields)
        found.quotas[name] = fields
    elif kind == "token":
        digest = fields.pop("hash", "")
        if not _HASH.fullmatch(digest):
            raise ConfigError("hash must be the 64 digits that `kvstore tokens add` writes")
        if bytes.fromhex(digest) in found.tokens:
            raise ConfigError("its hash stands in another line already")
        found.tokens[bytes.fromhex(digest)] = _principal(name, fields)
    else:
        found.certificates[name] = _principal(name, fields)
    seen[kind, name] = number


def _fields(words: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ConfigError("after the name it must have field=value, without spaces in it")
        if name in fields:
            raise ConfigError("it has a field twice")
        fields[name] = value
    return fields


def _principal(name: str, fields: dict[str, str]) -> Principal:
    if not _NAME.fullmatch(name):
        raise ConfigError("its name must be 1 to 255 printable characters of ASCII")
    if unknown := set(fields) - {"tenant", "role", "models", "expires"}:
        raise ConfigError(
            f"{len(unknown)} of its fields are unknown; known are tenant, role, models, expires, "
            "hash"
        )
    tenant, role = fields.get("tenant", ""), ROLES.get(fields.get("role", ""))
    if tenant != ALL:
        _check_tenant(tenant)
    if role is None:
        raise ConfigError(f"role must be one of {', '.join(ROLES)}")
    models = _list(fields.get("models", ""))
    if role is Role.NODE and (tenant != ALL or models):
        raise ConfigError("a node is of all tenants and models: tenant=*, and no models")
    return Principal(name, tenant, role, models, _expiry(fields.get("expires", "")))


def _share(tenant: str, fields: dict[str, str]) -> Share:
    _check_tenant(tenant)
    models, others = _list(fields.pop("models", "")), _list(fields.pop("with", ""))
    if fields or not models or not others:
        raise ConfigError("a share has models= and with=, and nothing else")
    for other in others:
        if other != ALL:
            _check_tenant(other)
    return Share(tenant, models, others)


def _check_tenant(name: str) -> None:
    if not TENANT.fullmatch(name):
        raise ConfigError(
            "a tenant's name is 1 to 63 letters, digits, - and _, and begins with no mark"
        )


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _expiry(text: str) -> float:
    if not text:
        return math.inf
    try:
        when = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        when = when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)
        return when.astimezone(datetime.timezone.utc).timestamp()  # fails for the year 10000
    except (ValueError, OverflowError) as error:
        raise ConfigError("expires must be a time such as 2027-01-01T00:00:00Z") from error


def expiry_text(expires_s: float) -> str:
    """Format an expiry as the file has it; empty if it never expires."""
    if expires_s == math.inf:
        return ""
    when = datetime.datetime.fromtimestamp(expires_s, datetime.timezone.utc)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")


def new_token(tenant: str) -> str:
    """Return a new token: the tenant's name, then 256 random bits.

    The name tells a client which tenant's namespaces to open.
    """
    secret = secrets.token_urlsafe(SECRET_NBYTES)
    return secret if tenant == ALL else f"{tenant}.{secret}"


def token_line(name: str, token: str, **fields: str) -> str:
    """Return the line of a token for the identities file."""
    return _line("token", name, hash=token_hash(token).hex(), **fields)


def certificate_line(name: str, **fields: str) -> str:
    """Return the line of a certificate for the identities file."""
    return _line("certificate", name, **fields)


def _line(kind: str, name: str, **fields: str) -> str:
    """Build a line of the file. Raises InvalidRequest if it would not be exactly one valid line."""
    line = " ".join([kind, name, *(f"{field}={value}" for field, value in fields.items() if value)])
    found = parse(line)
    if found.problems or len(found.tokens) + len(found.certificates) != 1 or "#" in line:
        why = (
            found.problems[0].partition(": ")[2]
            if found.problems
            else "a name has no spaces and no #"
        )
        raise InvalidRequest(f"this can not be an identity: {why}")
    return line


def read(path: Path) -> Identities:
    """Read an identities file. Raises ConfigError."""
    return parse(_text(path))


def add(path: Path, line: str, tell: Callable[[], object] = lambda: None) -> None:
    """Add a line to the file; create the file if it is missing.

    `tell` is called just before the file is written: if it raises, the file stays as it was. Raises
    InvalidRequest if the name exists already, and ConfigError.
    """
    kind, name = line.split()[:2]
    with _replaced(path) as lines:
        if any(some.split()[:2] == [kind, name] for some in lines):
            raise InvalidRequest(
                f"{path} has a {kind} named {name} already; revoke it first, or take another name"
            )
        tell()
        lines.append(line)


def revoke(path: Path, name: str) -> int:
    """Remove the tokens and certificates of this name and return how many there were.

    Raises ConfigError, also for a file that does not exist.
    """
    _text(path)
    with _replaced(path) as lines:
        kept = [
            line
            for line in lines
            if line.split()[:2] not in (["token", name], ["certificate", name])
        ]
        count = len(lines) - len(kept)
        lines[:] = kept
    return count


def set_quota(path: Path, tenant: str, fields: Mapping[str, str] | None) -> dict[str, str]:
    """Change these fields of a tenant's quota, or remove it (None), and return what it is now.

    A field of 0 means no limit, and is left out. The comment of the line stays. Raises ConfigError,
    and InvalidRequest for a name that no tenant can have.
    """
    try:
        _check_tenant(tenant)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error
    with _replaced(path) as lines:
        at = [
            i
            for i, line in enumerate(lines)
            if line.partition("#")[0].split()[:2] == ["tenant", tenant]
        ]
        known: dict[str, str] = {}
        for index in at[:1]:
            known = _fields(lines[index].partition("#")[0].split()[2:])
        left = {k: v for k, v in {**known, **(fields or {})}.items() if v != "0"} if fields else {}
        line = " ".join(["tenant", tenant, *(f"{name}={value}" for name, value in left.items())])
        if at:
            comment = lines[at[0]].partition("#")[1:]
            for index in reversed(at):  # a node uses the first one, and would then use the next
                del lines[index]
            lines[at[0] : at[0]] = [" ".join([line, "".join(comment)]).rstrip()] if left else []
        elif left:
            lines.append(line)
    return left


def replace(path: Path, content: bytes, lock_s: float = LOCK_S) -> None:
    """Replace the whole file, with its former mode and owner. Raises ConfigError."""
    with _locked(path, lock_s) as (target, _), _writing(target):
        about = os.stat(target)
        write_whole(target, content, about.st_mode & 0o7777, (about.st_uid, about.st_gid))


def check_replaceable(path: Path, content: bytes) -> None:
    """Raise ConfigError if `replace` could not write this content beside the file."""
    path = Path(os.path.realpath(path))
    with _writing(path):
        about = os.stat(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
            file.write(content)
            file.flush()
            if (about.st_uid, about.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), about.st_uid, about.st_gid)


def _text(path: Path) -> str:
    """Read the file as a node does: only a line feed ends a line, so comments stay comments."""
    content = read_guarded(f"identities={path}", 0, FILE_NBYTES_MAX)
    return content.decode(errors="replace")


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[list[str]]:
    """Yield the file's lines for changes and write them back, one writer at a time.

    Writes through a symbolic link, because a node may read the target by its own path.
    """
    with _locked(path) as (path, there):
        before = _text(path).split("\n") if there else []
        if before and not before[-1]:  # text after the last line's end
            before.pop()
        lines = list(before)
        yield lines
        if lines != before:
            with _writing(path):
                _write(path, lines, os.stat(path) if there else None)


@contextlib.contextmanager
def _locked(path: Path, lock_s: float = LOCK_S) -> Iterator[tuple[Path, bool]]:
    """Yield the file behind symbolic links, and whether it exists, to one writer at a time."""
    path = Path(os.path.realpath(path))
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path.parent} can not be opened: {error.strerror}") from error
    try:
        with _writing(path):
            _lock(directory, path, lock_s)
            there = path.exists()
        yield path, there
    finally:
        os.close(directory)


def _lock(directory: int, path: Path, lock_s: float) -> None:
    end_s = time.monotonic() + lock_s
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise ConfigError(
                    f"{path} can not be written: another process has locked its directory for "
                    f"{lock_s:g} s; `fuser {path.parent}` names it"
                ) from None
        time.sleep(0.01)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can not be written: {error.strerror}") from error


def _write(path: Path, lines: list[str], about: os.stat_result | None) -> None:
    """Write the lines with the file's former mode and owner."""
    content = "".join(f"{line}\n" for line in lines).encode()
    if about is None:
        write_whole(path, content, MODE_NEW)
    else:
        write_whole(path, content, about.st_mode & 0o7777, (about.st_uid, about.st_gid))
