"""Authorize every request, on every transport, before anything is done.

    (principal, request)            --> the role that its rule requires
    (principal, namespace digest)   --> the namespace; another tenant's looks missing

`RULES` names a request by its field in BulkRequest; `follow`, `reflection` and `metrics` have none.
`commit` and `release` belong to a put or get that was admitted.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import Forbidden, Unauthenticated
from kvstore.keys import Namespace, unknown
from kvstore.security.identities import Principal, Role
from node.auth.access import EVERYBODY, ITSELF, THE_NODE, Access, Caller
from node.auth.audit import Audit

Info = TypeVar("Info", bound=Any)  # NamespaceInfo
TENANT_NBYTES_MAX = 63  # an error repeats at most this much of a tenant name that a client sent


class Rule(NamedTuple):
    """The role that a request needs.

    `of_node`: it concerns the whole node, so only an identity of all tenants may send it. `is_act`:
    an act of administration, which is logged.
    """

    role: Role
    of_node: bool = False
    is_act: bool = False


_READ, _WRITE = Rule(Role.READ), Rule(Role.WRITE)
_OF_NODE = Rule(Role.ADMIN, of_node=True, is_act=True)

RULES = {
    "hello": _READ,
    "follow": _READ,
    "open_namespace": _READ,  # a reader may come before the first writer
    "list_namespaces": _READ,  # the reply has the caller's namespaces only
    "node_status": _READ,
    "events": Rule(Role.READ, of_node=True),  # they name all members and their disks
    "metrics": _READ,
    "lookup": _READ,
    "get": _READ,
    "verify": _READ,  # pages that a reader found corrupt are dropped
    "list": _READ,
    "query": _READ,  # as the feed
    "feed": _READ,  # the reply has what the caller may see
    "stat": _READ,
    "put": _WRITE,
    "commit": _WRITE,
    "release": _READ,
    "remove": _WRITE,
    "pin": _WRITE,
    "unpin": _WRITE,
    "hint": _WRITE,
    "remove_namespace": Rule(Role.ADMIN, is_act=True),
    "flush": _OF_NODE,
    "scrub": _OF_NODE,
    "recover": _OF_NODE,
    "drain": _OF_NODE,
    "sweep": _OF_NODE,
    "record": _OF_NODE,  # the recording covers all tenants, though without names or content
    "forget": _OF_NODE,  # it rewrites the rows of all tenants
    "push_identities": _OF_NODE,
    "reflection": Rule(Role.ADMIN),
}

# For requests that a node makes on behalf of others.
FORWARD = Rule(Role.NODE, of_node=True)

# Requests that are allowed in a shared namespace of another tenant.
SHARED = ("lookup", "get", "list", "stat", "verify")


class _NotVisible(Exception):
    """A namespace of another tenant: the caller gets a miss, the audit log the attempt."""


class Authorizer:
    """Decide about requests. Thread-safe.

    `find` returns the description of a namespace by its digest, or raises UnknownNamespace.
    """

    def __init__(self, access: Access, audit: Audit, find: Callable[[bytes], Namespace]) -> None:
        self.access = access
        self.audit = audit
        self._find = find

    def principal_of(self, caller: Caller) -> Principal:
        """Return the caller's principal. Raises Unauthenticated."""
        return EVERYBODY if self.access.open and caller is not THE_NODE else caller.principal()

    def visible_to(self, principal: Principal, infos: Iterable[Info]) -> list[Info]:
        """Return the namespaces that a principal may see."""
        if principal.of_all:
            return list(infos)
        return [
            info
            for info in infos
            if self.access.sees(principal, info.namespace.tenant, info.namespace.model)
        ]

    def authenticate(self, op: str, peer: str, find: Callable[[], Principal]) -> Principal:
        """Return the principal of a new connection and record refusals. Raises Unauthenticated."""
        try:
            return find()
        except Unauthenticated as error:
            self.audit.refused(op, peer, "", str(error))
            raise

    def refuse_connection(self, op: str, peer: str, principal: Principal, why: str) -> Forbidden:
        """Record that a known principal may not connect here, and return the error."""
        self.audit.refused(op, peer, principal.name, why)
        return Forbidden(why)

    def admit(self, op: str, request: Any, caller: Caller) -> Principal:
        """Return the principal that may send this request.

        Raises Unauthenticated, Forbidden, or UnknownNamespace for a namespace of another tenant.
        """
        name, rule, at = "", RULES[op], caller.address or caller.peer
        try:
            principal = self.principal_of(caller)
            name = principal.name
            if principal is not EVERYBODY and principal is not ITSELF:
                self._check(op, rule, request, principal)
        except (Unauthenticated, Forbidden) as error:
            self.audit.refused(op, at, name, str(error), request)
            raise
        except _NotVisible:
            self.audit.refused(op, at, name, "a namespace of others", request)
            raise unknown(request.namespace) from None
        if rule.is_act and principal is not ITSELF:
            self.audit.acted(op, at, name, request)
        return principal

    def _check(self, op: str, rule: Rule, request: Any, principal: Principal) -> None:
        _check_role(op, rule, principal)
        if getattr(request, "forwarded_by", ""):
            _check_role("forwarding pages of others", FORWARD, principal)
        if op == "open_namespace":
            self._check_description(principal, request.namespace.tenant, request.namespace.model)
        elif (
            isinstance(digest := getattr(request, "namespace", None), bytes)
            and not principal.of_all
        ):
            self._check_reach(op, principal, digest)

    def _check_reach(self, op: str, principal: Principal, digest: bytes) -> None:
        namespace = self._find(digest)
        if principal.owns(namespace.tenant, namespace.model):
            return
        if not self.access.sees(principal, namespace.tenant, namespace.model):
            raise _NotVisible
        if op not in SHARED:
            raise Forbidden(
                f"{principal.name} may only read this namespace, which {namespace.tenant} shares"
            )

    def _check_description(self, principal: Principal, tenant: str, model: str) -> None:
        if self.access.sees(principal, tenant, model):
            return
        if not principal.owns(tenant, "") and tenant != principal.tenant:
            raise Forbidden(
                f"{principal.name} belongs to tenant {principal.tenant}, the namespace to tenant "
                f"{tenant[:TENANT_NBYTES_MAX]!r}, which does not share it: make it with "
                f"Namespace(tenant={principal.tenant!r}); for an engine or a command, set tenant "
                f"(KVSTORE_TENANT) to {principal.tenant}, or leave it unset"
            )
        raise Forbidden(f"{principal.name} reaches models {', '.join(principal.models)} only")


def _check_role(op: str, rule: Rule, principal: Principal) -> None:
    if principal.role < rule.role:
        raise Forbidden(
            f"{principal.name} has the role {principal.role.name.lower()}; {op} needs "
            f"{rule.role.name.lower()}"
        )
    if rule.of_node and not principal.of_all:
        raise Forbidden(
            f"{principal.name} belongs to tenant {principal.tenant}; {op} needs an identity "
            "of all tenants (tenant=*)"
        )
