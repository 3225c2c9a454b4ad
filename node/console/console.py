"""What each path of the console answers, and to whom.

    /console/             the page, its style, its scripts: to everybody
    /console/events       what is happening, for as long as somebody listens
    /console/look-up      pages under a key
    /console/bytes        bytes of one of them
    /console/act          what an administrator does

All but the files ask who it is, as the metrics do: a bearer token, or a certificate.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.errors import Forbidden
from kvstore.identities import Principal
from kvstore.keys import Namespace
from node.access.caller import Caller
from node.console.acts import Acts
from node.console.exchange import OWN_HEADER, Answer, Refused, Request, Watch, Work, event, fields, reply
from node.console.files import answers
from node.console.history import History
from node.console.members import Members
from node.console.pages import Pages
from node.console.server import ConsoleServer
from node.console.snapshot import Snapshots
from node.peers.peers import Peers
from node.serve.http_host import UNTRUSTED_HOST, is_trusted_host
from node.serve.metrics_server import CONSOLE_PATH, Asker
from node.serve.service import Service

PREFIX = CONSOLE_PATH + "/"


class Console:
    """`hosts`: names of this node, beside addresses; `find` as of a gate."""

    def __init__(
        self,
        service: Service,
        peers: Peers,
        history: History,
        find: Callable[[bytes], Namespace],
        hosts: Collection[str] = (),
    ) -> None:
        self._service = service
        self._hosts = hosts
        self.server = ConsoleServer(self.respond)
        members = Members(peers.membership, peers.links, self.server.begun)
        self._snapshots = Snapshots(service, history, service.heat, members, service.traffic.slow)
        pages, acts = Pages(service, peers.membership, find), Acts(service, peers.membership)
        self._files = answers(PREFIX)
        self._work: dict[str, Callable[[Mapping[str, Any], Caller], bytes]] = {
            PREFIX + "look-up": pages.look_up,
            PREFIX + "bytes": pages.read,
            PREFIX + "act": acts.do,
        }

    def respond(self, request: Request, asker: Asker) -> Answer:
        """Raises KVStoreError and Refused."""
        if self._service.gate.access.open and not is_trusted_host(request.headers.get("host", ""), self._hosts):
            raise Refused("403 Forbidden", UNTRUSTED_HOST)
        if request.path == CONSOLE_PATH:
            return reply("text/plain", b"", "308 Permanent Redirect", {"Location": "console/"})
        if request.path in self._files:
            _check_method(request, "GET")
            return self._files[request.path]
        if request.path in (PREFIX + "events", *self._work):
            _check_method(request, "POST")
            if request.headers.get(OWN_HEADER) != "1":
                raise Refused("403 Forbidden", f"only the console's own page asks for this ({OWN_HEADER})")
            return self._of_somebody(request, asker)
        raise Refused("404 Not Found", "the console has no such path")

    def _of_somebody(self, request: Request, asker: Asker) -> Answer:
        gate, authorization = self._service.gate, request.headers.get("authorization", "")
        who = partial(gate.access.of_headers, authorization, asker.names)
        principal = gate.known("console", asker.peer, who)
        peer = gate.access.share(principal) or asker.peer
        caller = Caller(peer, who=who, at=asker.peer, may_wait=False, wire="console")
        if request.path == PREFIX + "events":
            return Watch(peer, partial(self._first, principal, caller), partial(self._next, principal, caller))
        do, values = self._work[request.path], fields(request)
        return Work(peer, lambda gone: do(values, replace(caller, gone=gone)), reads=request.path == PREFIX + "bytes")

    def _first(self, principal: Principal, caller: Caller) -> bytes:
        return event("now", self._snapshots.first(principal, caller))

    def _next(self, principal: Principal, caller: Caller) -> bytes:
        now = self._service.gate.who(caller)
        if now.scope != principal.scope or now.role != principal.role:
            raise Forbidden(f"{now.name} may no longer what it might when this page was opened; open it anew")
        return event("now", self._snapshots.next(now, caller))


def _check_method(request: Request, method: str) -> None:
    if request.method != method:
        raise Refused("405 Method Not Allowed", f"only {method}")
