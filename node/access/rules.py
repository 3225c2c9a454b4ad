"""What each request needs: a role, and for what concerns the whole node an identity that is of all tenants.

A request is named by its field in BulkRequest; `follow`, `reflection` and `metrics` have none. `commit` and `release`
belong to a put or get that was let in.
"""

from typing import NamedTuple

from kvstore.identities import Role


class Rule(NamedTuple):
    """`of_node`: only for who is of all tenants. `is_act`: of administration, which is written down."""

    role: Role
    of_node: bool = False
    is_act: bool = False


_READ, _WRITE = Rule(Role.READ), Rule(Role.WRITE)
_OF_NODE = Rule(Role.ADMIN, of_node=True, is_act=True)

RULES = {
    "hello": _READ,
    "follow": _READ,
    "open_namespace": _READ,  # a reader may come before the first writer
    "list_namespaces": _READ,  # each is told of its own
    "node_status": _READ,
    "metrics": _READ,
    "lookup": _READ,
    "get": _READ,
    "verify": _READ,  # what a reader found damaged goes
    "list": _READ,
    "stat": _READ,
    "put": _WRITE,
    "commit": _WRITE,
    "release": _READ,
    "remove": _WRITE,
    "pin": _WRITE,
    "unpin": _WRITE,
    "remove_namespace": Rule(Role.ADMIN, is_act=True),
    "flush": _OF_NODE,
    "scrub": _OF_NODE,
    "recover": _OF_NODE,
    "drain": _OF_NODE,
    "sweep": _OF_NODE,
    "record": _OF_NODE,  # of everybody's requests, though it does not say whose nor what they are
    "forget": _OF_NODE,  # it rewrites the rows of all tenants
    "reflection": Rule(Role.ADMIN),
}
# What a node does in the name of others.
FORWARD = Rule(Role.NODE, of_node=True)
