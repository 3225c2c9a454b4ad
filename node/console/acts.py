"""The few things that an administrator may do from the page. Each is a request of the schema, with its rule and its
line in the audit log."""

from collections.abc import Callable, Mapping
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.identities import Role
from kvstore.messages import plain
from kvstore.pb import kvstore_pb2 as pb
from node.access.caller import Caller
from node.console.pages import key_of, namespace_of
from node.peers.membership import Membership
from node.serve.http_server import Response, json_response
from node.serve.service import Service

WAIT_MS = 20_000  # for a flush
SCRUB_NBYTES = 64 << 20  # of one call; the page goes on from the cursor


class Acts:
    """Thread-safe."""

    def __init__(self, service: Service, membership: Membership) -> None:
        self._service = service
        self._membership = membership
        self._requests: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "flush": lambda values: pb.FlushRequest(wait_ms=WAIT_MS),
            "scrub": lambda values: pb.ScrubRequest(cursor=_cursor(values), nbytes_max=SCRUB_NBYTES),
            "recover": lambda values: pb.RecoverRequest(),
            "remove": self._removal,
        }

    def do(self, values: Mapping[str, Any], caller: Caller) -> Response:
        op = values.get("act")
        make = self._requests.get(op) if isinstance(op, str) else None
        if make is None or not isinstance(op, str):
            raise InvalidRequest(f"act: one of {', '.join(self._requests)}")
        gate = self._service.gate
        principal = gate.who(caller)
        if principal.role < Role.ADMIN:
            why = f"{principal.name} has the role {principal.role.name.lower()}; {op} in the console asks for admin"
            raise gate.turned_away(op, caller.at or caller.peer, principal, why)
        return json_response(plain(self._service.call(op, make(values), caller)))

    def _removal(self, values: Mapping[str, Any]) -> pb.RemoveRequest:
        if self._membership.view is not None:
            raise InvalidRequest("this node is one of a cluster, whose others may have the page, too: use kvstore rm")
        return pb.RemoveRequest(namespace=namespace_of(values), prefix_hashes=[key_of(values)])


def _cursor(values: Mapping[str, Any]) -> bytes:
    text = values.get("cursor", "")
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("cursor: that of the answer before") from error
