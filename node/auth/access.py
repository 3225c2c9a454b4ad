"""Find the identity of a caller.

The identities file is reloaded when it changes. `Caller` is the sender of a request; `FileReloader`
polls files that may change while the node runs.
"""

import hashlib
import logging
import math
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.errors import ConfigError, InvalidRequest, Unauthenticated
from kvstore.security.identities import (
    ALL,
    FILE_NBYTES_MAX,
    Identities,
    Principal,
    Role,
    check_replaceable,
    parse,
    replace,
    share_of,
    token_hash,
)
from kvstore.security.secrets import checked_stat, path_of, read_guarded, stamp
from node.auth.quotas import tenant_of

log = logging.getLogger(__name__)

EVERY_S = 1.0  # between two polls of the files
LOCK_S = 3.0  # of a push, for another writer; polls wait meanwhile


# principal of everybody at a node without authentication
EVERYBODY = Principal("everybody", ALL, Role.ADMIN)
ITSELF = Principal("the node itself", ALL, Role.ADMIN)


def refuse_anonymous() -> Principal:
    """Raise Unauthenticated for a caller without credentials."""
    raise Unauthenticated(
        "this node requires authentication: set token_file (KVSTORE_TOKEN_FILE), or a client "
        "certificate"
    )


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    `peer`: key that limits count it by. `has_left`: whether it has left and needs no answer.
    `may_wait`: whether it may wait for other nodes without delaying other requests. `principal`
    raises Unauthenticated, also if its credential is no longer valid. `address`: its own, where
    `peer` is a tenant. `wire`: the transport of the request.
    """

    peer: str
    has_left: Callable[[], bool] = lambda: False
    may_wait: bool = True
    principal: Callable[[], Principal] = refuse_anonymous
    address: str = ""
    wire: str = ""


THE_NODE = Caller("the node itself", principal=lambda: ITSELF)


class FileReloader:
    """A thread that calls each of `looks` once a second; a failing one does not stop the others."""

    def __init__(self, looks: Sequence[Callable[[], None]]) -> None:
        self._looks = looks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread that polls the files."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            for look in self._looks:
                try:
                    look()
                except Exception:
                    log.exception("a file could not be polled")


class Access:
    """The identities in force. Thread-safe: they are replaced as a whole.

    Without a file the node is `open`: there is no authentication.
    """

    def __init__(
        self,
        path: str,
        arena_for: Collection[str] = (),
        check_quota: Callable[[Mapping[str, str]], object] = lambda fields: None,
        writable: bool = False,
    ) -> None:
        """Read the identities file, or allow everybody without one.

        `arena_for` lists the tenants that may map this node's memory. `writable`: `push` may
        replace the file. Raises ConfigError for a file that is unreadable, or that other users may
        write.
        """
        self.writable = writable
        self._changing = threading.Lock()
        self._file = f"identities={path}"
        self.open = not path
        self._arena_for = arena_for
        self._check_quota = check_quota
        self._identities = Identities()
        self._signature: tuple[int, ...] = ()
        self._seen: tuple[int, ...] = ()  # of the last poll that found a change
        self.problem = ""  # why the file's content is not in force
        self.on_change: Callable[[Identities], None] = lambda identities: None
        if path:
            self._signature = self._looked()
            self._take(self._read())

    @property
    def identities(self) -> Identities:
        """Return the identities in force."""
        return self._identities

    # ---- authentication ------------------------------------------------------------------------

    def of_token(self, token: str) -> Principal:
        """Return the principal of a token. Raises Unauthenticated."""
        if self.open:
            return EVERYBODY
        return _valid(self._identities.tokens.get(token_hash(token)), "token")

    def of_headers(self, authorization: str, names: Sequence[str]) -> Principal:
        """Return the principal of an authorization header, or else of a certificate.

        Raises Unauthenticated.
        """
        if self.open:
            return EVERYBODY
        if not authorization:
            return self.of_certificate(names) if names else refuse_anonymous()
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the authorization is no bearer token")
        return self.of_token(token.strip())

    def of_certificate(self, names: Sequence[str]) -> Principal:
        """Return the principal of the first known name in a verified certificate."""
        if self.open:
            return EVERYBODY
        known = (self._identities.certificates.get(name) for name in names)
        found = next(filter(None, known), None)
        if found is None:
            raise Unauthenticated(
                "this node does not know this certificate, and no token came with it; set "
                "token_file (KVSTORE_TOKEN_FILE)"
            )
        return _valid(found, "certificate")

    def sees(self, principal: Principal, tenant: str, model: str) -> bool:
        """Return whether a namespace is the principal's own or shared with it."""
        return principal.owns(tenant, model) or any(
            share.lets(principal, tenant, model) for share in self._identities.shares
        )

    def why_no_arena(self, principal: Principal) -> str:
        """Return why a principal may not map the arena with all tenants' pages; empty: it may."""
        if self.open or (principal.of_all and principal.role >= Role.WRITE):
            return ""
        if principal.tenant not in self._arena_for:
            return (
                f"this node does not trust tenant {principal.tenant} with its memory (--shm-trust)"
            )
        if principal.role < Role.WRITE or principal.models:
            return (
                f"{principal.name} may not write all pages of {principal.tenant}, and in shared "
                "memory it could"
            )
        return ""

    def credential(self, token: str, names: Sequence[str]) -> "Credential":
        """Return the credential of a connection that showed this token or certificate."""
        return Credential(self, token, names)

    def share(self, principal: Principal) -> str:
        """Return the tenant that a principal's usage counts to; empty: its address counts instead.

        There is one if the node has several tenants, or the tenant has a quota.
        """
        return principal.share if self._has_own_share(principal.tenant) else ""

    def owner_of(self, tenant: str, peer: str) -> str:
        """Return the owner whose share of the namespace limit a namespace counts to.

        It is the namespace's tenant, also if a node or a reading tenant opened it. If tenants have
        no shares, it is `peer`, which opened it.
        """
        if tenant_of(peer) or self.open or not self._has_own_share(tenant):
            return peer
        return share_of(tenant)

    def _has_own_share(self, tenant: str) -> bool:
        return self._identities.tenant_count > 1 or tenant in self._identities.quotas

    # ---- the file ------------------------------------------------------------------------

    def poll(self) -> None:
        """Reload the identities file if it has changed.

        A file that cannot be used changes nothing and is logged once. A file that ends within a
        line may be half written: it is used if it is unchanged at the next poll.
        """
        if self.open:
            return
        with self._changing:
            self._poll()

    def _poll(self) -> None:
        try:
            signature = self._looked()
            if signature == self._signature:
                self.problem = ""
                return
            identities, seen, self._seen = self._read(), self._seen, signature
            if not identities.whole and signature != seen:
                return
            self._take(identities)
            self._signature, self.problem = signature, ""
        except ConfigError as error:
            if str(error) != self.problem:
                log.error("%s; the previous identities stay in force", error)
            self.problem = str(error)

    def push(
        self, content: bytes, caller: Principal, force: bool = False, check: bool = False
    ) -> tuple[Identities, set[str], set[str]]:
        """Replace the file and put it in force; with `check`, only try whether that can be done.

        Return the new identities, and the names that it adds and removes. Raises
        InvalidRequest at a node that does not allow it, for a file with an invalid line, or,
        without `force`, for one that takes the rights of an administrator from the caller or
        removes an identity of a member. Raises ConfigError if the file can not be written.
        """
        if not self.writable:
            raise InvalidRequest(
                "this node's identities are changed on its host only; start it with "
                "--identities-writable to allow it to administrators"
            )
        new = self._parsed(content)
        if new.problems or not new.count or not new.whole:
            why = new.problems[0] if new.problems else "it is empty, or its last line has no end"
            raise InvalidRequest(f"this file of identities is not valid: {why}; nothing is changed")
        with self._changing:
            now = self._identities
            if not force:
                _check_rights(now, new, caller)
            added, removed = new.names - now.names, now.names - new.names
            path = Path(path_of(self._file))
            if check:
                check_replaceable(path, content)
            else:
                replace(path, content, LOCK_S)
                self._signature = ()  # read again: another writer may have changed it since
                self._take(new)
                log.warning(
                    "%s replaced the identities: %s is in force, %d added, %d removed",
                    caller.name,
                    new.digest.hex()[:12],
                    len(added),
                    len(removed),
                )
        return new, added, removed

    def _looked(self) -> tuple[int, ...]:
        return stamp(checked_stat(self._file, stat.S_IWOTH))

    def _read(self) -> Identities:
        data = read_guarded(self._file, stat.S_IWOTH, FILE_NBYTES_MAX)
        return self._parsed(data)

    def _parsed(self, data: bytes) -> Identities:
        found = parse(data.decode(errors="replace"), self._check_quota)
        found.digest = hashlib.sha256(data).digest()
        return found

    def _take(self, identities: Identities) -> None:
        for problem in identities.problems:
            log.error("%s, %s; it is skipped", self._file, problem)
        if not identities.tokens and not identities.certificates:
            log.warning("%s has no identities: every request is refused", self._file)
        self._identities = identities
        self.on_change(identities)


class Credential:
    """The principal of a connection, as long as its credential is valid.

    Used by one thread.
    """

    def __init__(self, access: Access, token: str, names: Sequence[str]) -> None:
        self._access = access
        self._find = (
            partial(access.of_token, token)
            if token
            else partial(access.of_certificate, names)
            if names
            else refuse_anonymous
        )
        self._of: Identities | None = None
        self._principal = EVERYBODY

    def __call__(self) -> Principal:
        """Return the principal now. Raises Unauthenticated."""
        identities = self._access.identities
        if identities is not self._of or self._principal.expires_s != math.inf:
            self._of = None
            self._principal = self._find()
            self._of = identities
        return self._principal


def _check_rights(now: Identities, new: Identities, caller: Principal) -> None:
    """Raise InvalidRequest if new identities lock out the caller or a member of the cluster."""
    credentials = (
        [(now.tokens[key], new.tokens.get(key)) for key in now.tokens],
        [(now.certificates[key], new.certificates.get(key)) for key in now.certificates],
    )
    pairs = [pair for some in credentials for pair in some]
    if not any(old == caller and _is_of_all(then, Role.ADMIN) for old, then in pairs):
        raise InvalidRequest(
            f"with this file {caller.name} would no longer administer this node with the same "
            "credential; add it, or use --force"
        )
    for old, then in pairs:
        is_member = old.role is Role.NODE and old.expires_s > time.time()
        if is_member and not _is_of_all(then, Role.NODE):
            raise InvalidRequest(
                f"without {old.name}, of role node, members could not reach each other; add it, or "
                "use --force"
            )


def _is_of_all(principal: Principal | None, role: Role) -> bool:
    """Return whether an identity of all tenants has at least a role, and has not expired."""
    return (
        principal is not None
        and principal.role >= role
        and principal.of_all
        and principal.expires_s > time.time()
    )


def _valid(principal: Principal | None, what: str) -> Principal:
    if principal is None:
        raise Unauthenticated(f"this node does not know this {what}; it may have been revoked")
    if principal.expires_s <= time.time():
        raise Unauthenticated(f"the {what} of {principal.name} has expired; ask for another")
    return principal
