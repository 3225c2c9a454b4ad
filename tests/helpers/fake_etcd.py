"""An in-process etcd with the parts that `node.cluster.etcd` uses.

It has keys with revisions, transactions, leases, watches and users. It can be stopped and restarted
on its port, be slow, and lose its leases or all data. Leases last until a test ends them, because a
busy machine is late with keep-alives; `leases_age` lets them end by themselves.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from node.pb import etcd_pb2 as pb
from node.pb import etcd_pb2_grpc as rpc

TICK_S = 0.02
TOKEN = "a token"
PORT_WAIT_S = 30.0


class FakeEtcd(rpc.KVServicer, rpc.LeaseServicer, rpc.WatchServicer, rpc.AuthServicer):
    """`users`: passwords by name; if empty, everybody has access."""

    def __init__(self, users: dict[str, str] | None = None) -> None:
        self.changed = threading.Condition()
        self.revision = 1
        self.kvs: dict[bytes, pb.KeyValue] = {}
        self.events: list[pb.Event] = []
        self.leases: dict[int, tuple[int, float]] = {}  # ttl, end
        self.slow_s = 0.0  # delay before each answer
        self.late_s = 0.0  # delay before each watch event
        self.calls = 0
        self.compacted = 0
        self.keys_max = 1 << 20  # limit of one answer
        self.granted_s: int | None = None  # TTL of all leases, instead of the requested one
        self.leases_age = False
        self._numbers = itertools.count(7)
        self._now_s = 0.0
        self._users = users or {}
        self._server: grpc.Server | None = None
        self.port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._down = threading.Event()
        self._threads = futures.ThreadPoolExecutor(64)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        for add in (
            rpc.add_KVServicer_to_server,
            rpc.add_LeaseServicer_to_server,
            rpc.add_WatchServicer_to_server,
            rpc.add_AuthServicer_to_server,
        ):
            add(self, self._server)  # type: ignore[no-untyped-call]
        end = time.monotonic() + PORT_WAIT_S
        while True:
            try:
                self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
                break
            except RuntimeError:  # a connection of another test has this port meanwhile
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._server.start()
        self._ticker = threading.Thread(target=self._tick, args=(self._down,))
        self._ticker.start()

    def stop(self) -> None:
        """Stop the server; its data survives a restart, which renews all leases as etcd does."""
        if self._server is None:
            return
        self._down.set()
        with self.changed:
            self.changed.notify_all()
        self._server.stop(0.0).wait()
        self._server = None
        self._threads.shutdown()
        self._ticker.join()
        with self.changed:
            self.leases = {
                number: (ttl, self._now_s + ttl) for number, (ttl, _) in self.leases.items()
            }

    def wipe(self) -> None:
        """Delete all data, as if its disk were new."""
        with self.changed:
            self.revision, self.kvs, self.events, self.leases = 1, {}, [], {}

    def lose_lease(self, number: int) -> None:
        with self.changed:
            self._end(number)

    def lose_leases(self) -> None:
        with self.changed:
            self.leases = {number: (ttl, 0.0) for number, (ttl, _) in self.leases.items()}
            self._expire()

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self._put(pb.PutRequest(key=key.encode(), value=value))

    def delete(self, key: str) -> None:
        with self.changed:
            self._delete(key.encode())

    def names(self) -> list[str]:
        with self.changed:
            return sorted(key.decode() for key in self.kvs)

    # ---- internal; the caller holds the lock ---------------------------------------------

    def has(self, key: str, part: bytes = b"") -> bool:
        """Return whether a key is there and its value contains `part`."""
        with self.changed:
            found = self.kvs.get(key.encode())
        return found is not None and part in found.value

    def _tick(self, down: threading.Event) -> None:
        while not down.wait(TICK_S):
            with self.changed:
                self._now_s += TICK_S if self.leases_age else 0.0
                self._expire()

    def _expire(self) -> None:
        for number in [number for number, (_, end) in self.leases.items() if end <= self._now_s]:
            self._end(number)

    def _end(self, number: int) -> None:
        del self.leases[number]
        for key in [key for key, kv in self.kvs.items() if kv.lease == number]:
            self._delete(key)

    def _tell(self, event: pb.Event) -> None:
        self.events.append(event)
        self.changed.notify_all()

    def _put(self, request: pb.PutRequest) -> None:
        self.revision += 1
        old = self.kvs.get(request.key)
        created = old.create_revision if old else self.revision
        kv = pb.KeyValue(
            key=request.key,
            value=request.value,
            lease=request.lease,
            create_revision=created,
            mod_revision=self.revision,
        )
        self.kvs[request.key] = kv
        self._tell(pb.Event(type=pb.Event.PUT, kv=kv))

    def _delete(self, key: bytes) -> None:
        if self.kvs.pop(key, None):
            self.revision += 1
            kv = pb.KeyValue(key=key, mod_revision=self.revision)
            self._tell(pb.Event(type=pb.Event.DELETE, kv=kv))

    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(revision=self.revision)

    def _begin(self, context: Any) -> None:
        self.calls += 1
        if self.slow_s:
            self._down.wait(self.slow_s)
        if self._users and ("token", TOKEN) not in tuple(context.invocation_metadata()):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty")

    # ---- calls ---------------------------------------------------------------------------

    def Range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        self._begin(context)
        with self.changed:
            reply = self._range(request)
        if len(reply.kvs) > self.keys_max:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
        return reply

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        found = [
            kv for key, kv in sorted(self.kvs.items()) if _in(key, request.key, request.range_end)
        ]
        some = found[: request.limit or None]
        return pb.RangeResponse(header=self._header(), kvs=some, more=len(some) < len(found))

    def Txn(self, request: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        self._begin(context)
        with self.changed:
            there = [(some, self.kvs.get(some.key)) for some in request.compare]
            succeeded = all(
                (kv.mod_revision if kv else 0) == some.mod_revision for some, kv in there
            )
            responses = []
            for op in request.success if succeeded else request.failure:
                if op.HasField("request_put"):
                    if op.request_put.lease and op.request_put.lease not in self.leases:
                        context.abort(
                            grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found"
                        )
                    self._put(op.request_put)
                    responses.append(
                        pb.ResponseOp(response_put=pb.PutResponse(header=self._header()))
                    )
                else:
                    responses.append(pb.ResponseOp(response_range=self._range(op.request_range)))
            return pb.TxnResponse(header=self._header(), succeeded=succeeded, responses=responses)

    def LeaseGrant(self, request: pb.LeaseGrantRequest, context: Any) -> pb.LeaseGrantResponse:
        self._begin(context)
        with self.changed:
            number = next(self._numbers)
            ttl = request.TTL if self.granted_s is None else self.granted_s
            self.leases[number] = (ttl, self._now_s + ttl)
            return pb.LeaseGrantResponse(header=self._header(), ID=number, TTL=ttl)

    def LeaseRevoke(self, request: pb.LeaseRevokeRequest, context: Any) -> pb.LeaseRevokeResponse:
        self._begin(context)
        with self.changed:
            if request.ID in self.leases:
                self._end(request.ID)
            return pb.LeaseRevokeResponse(header=self._header())

    def LeaseKeepAlive(
        self, requests: Iterator[pb.LeaseKeepAliveRequest], context: Any
    ) -> Iterator[Any]:
        self._begin(context)
        for request in requests:
            with self.changed:
                ttl, _ = self.leases.get(request.ID, (0, 0.0))
                if ttl:
                    self.leases[request.ID] = (ttl, self._now_s + ttl)
                reply = pb.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl)
            yield reply

    def Watch(
        self, requests: Iterator[pb.WatchRequest], context: Any
    ) -> Iterator[pb.WatchResponse]:
        self._begin(context)
        create, down = next(requests).create_request, self._down
        yield pb.WatchResponse(header=self._header(), created=True)
        sent = create.start_revision - 1
        if sent < self.compacted:
            yield pb.WatchResponse(
                header=self._header(), canceled=True, compact_revision=self.compacted
            )
            return
        while not down.is_set() and context.is_active():
            with self.changed:
                events = [event for event in self.events if event.kv.mod_revision > sent]
                if not events:
                    self.changed.wait(TICK_S)
                sent = max([sent, *(event.kv.mod_revision for event in events)])
                ours = [
                    event for event in events if _in(event.kv.key, create.key, create.range_end)
                ]
                reply = pb.WatchResponse(header=self._header(), events=ours)
            if ours:
                down.wait(self.late_s)
                yield reply

    def Authenticate(
        self, request: pb.AuthenticateRequest, context: Any
    ) -> pb.AuthenticateResponse:
        if self._users.get(request.name) != request.password:
            message = "etcdserver: authentication failed, invalid user ID or password"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        return pb.AuthenticateResponse(token=TOKEN)


def _in(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key < end if end else key == first
