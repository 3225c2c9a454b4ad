"""Answer each path of the console, for authorized users.

    /console/             the page, its style, its scripts: public
    /console/events       a stream of events, while the user watches
    /console/look-up      pages with a key
    /console/bytes        bytes of one of them
    /console/act          the few acts for administrators, each a request of the schema

All but the files need a bearer token or a certificate, as the metrics do. Each request has its own
thread (`node.serving.http_server`), so a hanging disk read delays no other request. Budgets limit
how many requests are accepted at a time, and semaphores how many of them run.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from kvstore.errors import Forbidden, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.messages import plain
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal, Role
from kvstore.threads import begun
from node.auth.access import Caller
from node.cluster.membership import Membership
from node.cluster.peers import Peers
from node.console.history import History
from node.console.members import Members
from node.console.pages import Pages, key_of, namespace_of
from node.console.snapshot import Snapshots
from node.serving.http_server import (
    STOP_S,
    Disconnected,
    Request,
    Response,
    http_status,
    json_response,
    text,
)
from node.serving.limits import CONSOLE_CALLS_MAX, WATCHERS_MAX, Budget, make_limit
from node.serving.metrics import CONSOLE_PATH
from node.serving.service import Service

log = logging.getLogger(__name__)

PREFIX = CONSOLE_PATH + "/"
# Only a script of the console's own origin can send it. For a page of another site, a browser asks
# the server before it sends such a header, and no reply of a node allows it.
OWN_HEADER = "x-kvstore-console"
EVERY_S = 2.0
STALL_S = 15.0  # a watcher that does not take one event in this time is disconnected
AT_WORK_MAX = 2
WAIT_MS = 20_000  # for a flush
SCRUB_NBYTES = 64 << 20  # of one call; the page continues from the cursor
NAMES = (
    "page.html",
    "style.css",
    "icon.svg",
    "console.js",
    "address.js",
    "board.js",
    "dom.js",
    "graphs.js",
    "look.js",
    "node.js",
    "tables.js",
    "planes.js",
    "words.js",
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

Result = TypeVar("Result")


class Acts:
    """The few acts that an administrator may perform in the console.

    Thread-safe. Each is a request of the schema, with its rule and its line in the audit log.
    """

    def __init__(self, service: Service, membership: Membership) -> None:
        self._service = service
        self._membership = membership
        self._requests: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "flush": lambda values: pb.FlushRequest(wait_ms=WAIT_MS),
            "scrub": lambda values: pb.ScrubRequest(
                cursor=_cursor(values), nbytes_max=SCRUB_NBYTES
            ),
            "recover": lambda values: pb.RecoverRequest(),
            "remove": self._removal,
        }

    def do(self, values: Mapping[str, Any], caller: Caller) -> Response:
        """Carry an act of the console's user out."""
        op = values.get("act")
        make = self._requests.get(op) if isinstance(op, str) else None
        if make is None or not isinstance(op, str):
            raise InvalidRequest(f"act: one of {', '.join(self._requests)}")
        gate = self._service.authorizer
        principal = gate.principal_of(caller)
        if principal.role < Role.ADMIN:
            why = (
                f"{principal.name} has the role {principal.role.name.lower()}; {op} in the "
                "console needs admin"
            )
            raise gate.refuse_connection(op, caller.address or caller.peer, principal, why)
        return json_response(plain(self._service.call(op, make(values), caller)))

    def _removal(self, values: Mapping[str, Any]) -> pb.RemoveRequest:
        if self._membership.view is not None:
            raise InvalidRequest(
                "this node is a member of a cluster, and others may have the page, too: "
                "use kvstore rm"
            )
        return pb.RemoveRequest(namespace=namespace_of(values), prefix_hashes=[key_of(values)])


def _cursor(values: Mapping[str, Any]) -> bytes:
    text = values.get("cursor", "")
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("cursor: that of the previous answer") from error


class Console:
    """The console. Thread-safe.

    `find`: as in `Authorizer`.
    """

    def __init__(
        self, service: Service, peers: Peers, history: History, find: Callable[[bytes], Namespace]
    ) -> None:
        self._service = service
        self._history = history
        self.watchers = Budget(make_limit("console watchers", WATCHERS_MAX, "close some pages"))
        self.calls = Budget(
            make_limit("console calls", CONSOLE_CALLS_MAX, "wait for those that run")
        )
        self.reads = Budget(
            make_limit("console reads", CONSOLE_CALLS_MAX, "wait for those that run")
        )
        self._calls_at_work = threading.BoundedSemaphore(AT_WORK_MAX)
        self._reads_at_work = threading.BoundedSemaphore(AT_WORK_MAX)
        self._pool = ThreadPoolExecutor(1, "console-members")
        self._round: Future[Any] | None = None
        members = Members(peers.membership, peers.channels, self._begin_round)
        self._snapshots = Snapshots(
            service, history, service.hot_prefixes, members, service.traffic.slow
        )
        self._snapping = threading.Lock()
        pages, acts = Pages(service, peers.membership, find), Acts(service, peers.membership)
        self._files = _files()
        self._work: dict[str, Callable[[Mapping[str, Any], Caller], Response]] = {
            PREFIX + "look-up": pages.look_up,
            PREFIX + "bytes": pages.read,
            PREFIX + "act": acts.do,
        }

    def stop(self) -> None:
        """Stop background work, and save the history.

        Requests end with their server.
        """
        self._history.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._round is not None:
            wait([self._round], STOP_S)

    def _begin_round(self, do: Callable[[], object]) -> "Future[Any] | None":
        self._round = begun(self._pool, do)
        return self._round

    def respond(self, request: Request) -> Response | None:
        """Return the reply, or None after a stream of events."""
        if request.path == CONSOLE_PATH:
            return Response("text/plain", b"", 308, {"Location": "console/"})
        if request.path in self._files:
            return self._files[request.path] if request.method == "GET" else text("only GET", 405)
        if request.path not in (PREFIX + "events", *self._work):
            return text("the console has no such path", 404)
        if request.method != "POST":
            return text("only POST", 405)
        if request.headers.get(OWN_HEADER) != "1":
            return text(f"only the console's own page may request this ({OWN_HEADER})", 403)
        try:
            return _guarded(lambda: self._of_somebody(request))
        except KVStoreError as error:
            return json_response({"error": str(error)}, http_status(error))

    def _of_somebody(self, request: Request) -> Response | None:
        gate, asker = self._service.authorizer, request.client
        principal_now = partial(
            gate.access.of_headers, request.headers.get("authorization", ""), asker.names
        )
        principal = gate.authenticate("console", asker.peer, principal_now)
        peer = gate.access.share(principal) or asker.peer
        has_left = request.connection.has_left
        caller = Caller(
            peer,
            principal=principal_now,
            address=asker.peer,
            may_wait=False,
            wire="console",
            has_left=has_left,
        )
        if request.path == PREFIX + "events":
            self._watch(request, principal, caller)
            return None
        return self._work_of(request, caller)

    def _work_of(self, request: Request, caller: Caller) -> Response:
        reads = request.path == PREFIX + "bytes"  # only these read the disk, which may hang
        calls, at_work = (
            (self.reads, self._reads_at_work) if reads else (self.calls, self._calls_at_work)
        )
        values = fields(request)
        with calls.lent(caller.peer), at_work:
            if request.connection.has_left():  # it waited for others, and the node may be stopping
                raise Unavailable("the client has left")
            return self._work[request.path](values, caller)

    # ---- watchers ------------------------------------------------------------------------

    def _watch(self, request: Request, principal: Principal, caller: Caller) -> None:
        """Send an event each `EVERY_S` until the client leaves or loses the right to see it."""
        connection = request.connection
        with self.watchers.lent(caller.peer):
            with self._snapping:
                data = self._snapshots.first(principal, caller)
            connection.start_stream("text/event-stream", STALL_S)
            connection.send(event("now", data), STALL_S)
            while connection.wait(EVERY_S):
                try:
                    data = _guarded(lambda: self._next(principal, caller))
                except KVStoreError as error:
                    connection.send(event("end", json.dumps({"error": str(error)})), STALL_S)
                    return
                connection.send(event("now", data), STALL_S)

    def _next(self, principal: Principal, caller: Caller) -> str:
        now = self._service.authorizer.principal_of(caller)
        if now.scope != principal.scope or now.role != principal.role:
            raise Forbidden(f"{now.name} has lost rights since this page was opened; open it again")
        with self._snapping:
            return self._snapshots.next(now, caller)


def event(name: str, data: str) -> bytes:
    """Return one event of a stream.

    `data` is JSON, on one line.
    """
    return f"event: {name}\ndata: {data}\n\n".encode()


def fields(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body.

    Raises InvalidRequest.
    """
    try:
        values = json.loads(request.body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is no JSON") from error
    if not isinstance(values, dict):
        raise InvalidRequest("the body is no object of JSON")
    return values


def _files() -> dict[str, Response]:
    """Return the page (at `PREFIX`) and its files, by path.

    They are the same for everybody.
    """
    folder = resources.files(__package__)
    found = {}
    for name in NAMES:
        content_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        path = PREFIX if name == "page.html" else PREFIX + name
        found[path] = Response(content_type, folder.joinpath(name).read_bytes())
    return found


def _guarded(do: Callable[[], Result]) -> Result:
    """Log an unexpected error, and turn it into an error of this request."""
    try:
        return do()
    except (KVStoreError, Disconnected):
        raise
    except Exception as error:
        log.exception("console: a call failed")
        raise KVStoreError(
            f"it failed inside the node ({type(error).__name__}); its log says more"
        ) from error
