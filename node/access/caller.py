"""Who asks: the caller of a request, and who may be one without a credential."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import Unauthenticated
from kvstore.identities import ALL, Principal, Role

EVERYBODY = Principal("everybody", ALL, Role.ADMIN)  # at a node that asks nobody who he is
ITSELF = Principal("the node itself", ALL, Role.ADMIN)


def nobody() -> Principal:
    raise Unauthenticated("this node asks who you are: set a token (KVSTORE_TOKEN) or a client certificate")


@dataclass(frozen=True)
class Caller:
    """Of a request. `peer` is whose share it counts to; `gone` says that nobody waits for the answer any more.
    `may_wait`: for other nodes, without keeping others from their answers. `who` raises Unauthenticated, also when
    what it was known by is not valid any more. `at`: the address, where `peer` is a tenant. `wire`: on which he
    asks."""

    peer: str
    gone: Callable[[], bool] = lambda: False
    may_wait: bool = True
    who: Callable[[], Principal] = nobody
    at: str = ""
    wire: str = ""


THE_NODE = Caller("the node itself", who=lambda: ITSELF)
