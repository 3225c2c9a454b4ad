"""Find the identity of a caller.

The identities file is reloaded when it changes. `Caller` is the sender of a request; `FileReloader`
polls files that may change while the node runs.
"""

import logging
import math
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.errors import ConfigError, Unauthenticated
from kvstore.security.identities import (
    ALL,
    FILE_NBYTES_MAX,
    Identities,
    Principal,
    Role,
    parse,
    share_of,
    token_hash,
)
from kvstore.security.secrets import checked_stat, read_guarded, stamp
from node.auth.quotas import tenant_of

log = logging.getLogger(__name__)

EVERY_S = 1.0  # between two polls of the files


# principal of everybody at a node without authentication
EVERYBODY = Principal("everybody", ALL, Role.ADMIN)
ITSELF = Principal("the node itself", ALL, Role.ADMIN)


def refuse_anonymous() -> Principal:
    """Raise Unauthenticated for a caller without credentials."""
    raise Unauthenticated(
        "this node requires authentication: set a token (KVSTORE_TOKEN) or a client certificate"
    )


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    `peer`: key that limits count it by. `gone`: whether it has left and needs no answer.
    `may_wait`: whether it may wait for other nodes without delaying other requests. `who` raises
    Unauthenticated, also if its credential is no longer valid. `at`: its address, where `peer` is a
    tenant. `wire`: the transport of the request.
    """

    peer: str
    gone: Callable[[], bool] = lambda: False
    may_wait: bool = True
    who: Callable[[], Principal] = refuse_anonymous
    at: str = ""
    wire: str = ""


THE_NODE = Caller("the node itself", who=lambda: ITSELF)


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
    ) -> None:
        """Read the identities file, or allow everybody without one.

        `arena_for` lists the tenants that may map this node's memory. Raises ConfigError for a file
        that is unreadable, or that other users may write.
        """
        self._file = f"identities={path}"
        self.open = not path
        self._arena_for = arena_for
        self._check_quota = check_quota
        self._identities = Identities()
        self._signature: tuple[int, ...] = ()
        self._seen: tuple[int, ...] = ()  # of the last poll that found a change
        self._failed: str = ""  # the last logged error
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
        return _valid(next(filter(None, known), None), "certificate")

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
        try:
            signature = self._looked()
            if signature == self._signature:
                return
            identities, seen, self._seen = self._read(), self._seen, signature
            if not identities.whole and signature != seen:
                return
            self._take(identities)
            self._signature, self._failed = signature, ""
        except ConfigError as error:
            if str(error) != self._failed:
                log.error("%s; the previous identities stay in force", error)
            self._failed = str(error)

    def _looked(self) -> tuple[int, ...]:
        return stamp(checked_stat(self._file, stat.S_IWOTH))

    def _read(self) -> Identities:
        data = read_guarded(self._file, stat.S_IWOTH, FILE_NBYTES_MAX)
        return parse(data.decode(errors="replace"), self._check_quota)

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


def _valid(principal: Principal | None, what: str) -> Principal:
    if principal is None:
        raise Unauthenticated(f"this node does not know this {what}; it may have been revoked")
    if principal.expires_s <= time.time():
        raise Unauthenticated(f"the {what} of {principal.name} has expired; ask for another")
    return principal
