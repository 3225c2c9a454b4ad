"""The file of identities: who there is, what he may, and which namespaces tenants share.

    token        ci        tenant=team-a role=write hash=<SHA-256 of the token, 64 hex digits> models=llama-*,qwen-*
    certificate  gpu-7     tenant=team-a role=write expires=2027-01-01T00:00:00Z
    tenant       team-a    ram=40GiB disk=400GiB
    share        team-a    models=prompts-* with=team-b,team-c

One entry a line; `#` begins a comment. A token is the start of a tenant's name and 256 random bits, of which only the
hash is kept: a plain SHA-256, for there is nothing to guess. A line that is wrong is left out and told by its number,
never by what it says; the others are in force.
"""

import datetime
import enum
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from kvstore.errors import ConfigError

ALL = "*"  # the tenant of who is of all of them


class Role(enum.IntEnum):
    """Each may what those before it may. A node hands on what others gave it, in any tenant's name."""

    READ = 1
    WRITE = 2
    NODE = 3
    ADMIN = 4


@dataclass(frozen=True)
class Principal:
    """`models`: patterns, as a shell has them, of the models whose namespaces it reaches; none: all. `expires_s`:
    seconds since the epoch."""

    name: str
    tenant: str
    role: Role
    models: tuple[str, ...] = ()
    expires_s: float = math.inf

    @property
    def of_all(self) -> bool:
        """Whether it is of all tenants, and of all of each."""
        return self.tenant == ALL and not self.models

    def owns(self, tenant: str, model: str) -> bool:
        """Whether a namespace of this tenant and model is his."""
        return self.tenant in (ALL, tenant) and matches(model, self.models)

    @property
    def scope(self) -> tuple[str, tuple[str, ...]]:
        """Equal for those who are told the same."""
        return self.tenant, self.models

    @property
    def share(self) -> str:
        """Whose share its connections, calls and bytes count to; empty: its address's."""
        return "" if self.tenant == ALL else share_of(self.tenant)


def share_of(tenant: str) -> str:
    """Return the name by which limits count a tenant's usage, from all addresses together."""
    return f"tenant {tenant}"


def matches(model: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(model, pattern) for pattern in patterns)


TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_NAME = re.compile(r"[!-~]{1,255}")  # certificates have all kinds of names
_HASH = re.compile(r"[0-9a-f]{64}")
LINES_MAX = 100_000
ROLES = {role.name.lower(): role for role in Role}


@dataclass(frozen=True)
class Share:
    """Namespaces of a tenant that others may read."""

    tenant: str
    models: tuple[str, ...]
    others: tuple[str, ...]

    def lets(self, principal: Principal, tenant: str, model: str) -> bool:
        others = ALL in self.others or principal.tenant in self.others
        return tenant == self.tenant and others and matches(model, self.models) and matches(model, principal.models)


@dataclass
class Identities:
    """`problems`: of the lines that were left out, a sentence each. `quotas`: of each tenant, its settings as text.
    `whole`: whether the last line has its end."""

    tokens: dict[bytes, Principal] = field(default_factory=dict)
    certificates: dict[str, Principal] = field(default_factory=dict)
    quotas: dict[str, dict[str, str]] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    whole: bool = True

    @cached_property
    def tenant_count(self) -> int:
        known = (*self.tokens.values(), *self.certificates.values())
        return len({principal.tenant for principal in known} - {ALL})


def token_hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def parse(text: str, check_quota: Callable[[Mapping[str, str]], object] = lambda fields: None) -> Identities:
    """`check_quota` raises ConfigError for fields that are no quota."""
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
        found.problems.append(f"line {LINES_MAX + 1} and those behind it: a file has {LINES_MAX} lines at most")
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
        raise ConfigError(f"{len(unknown)} of its fields are unknown; known are tenant, role, models, expires, hash")
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
        raise ConfigError("a tenant's name is 1 to 63 letters, digits, - and _, and begins with no mark")


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _expiry(text: str) -> float:
    if not text:
        return math.inf
    try:
        when = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        when = when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)
        return when.astimezone(datetime.timezone.utc).timestamp()  # the year 10000 is none
    except (ValueError, OverflowError) as error:
        raise ConfigError("expires must be a time such as 2027-01-01T00:00:00Z") from error


def expiry_text(expires_s: float) -> str:
    """As the file has it; empty: never."""
    if expires_s == math.inf:
        return ""
    when = datetime.datetime.fromtimestamp(expires_s, datetime.timezone.utc)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
