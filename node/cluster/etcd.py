"""Use etcd as a registry needs it: reads, compare-and-swap, watches, leases, TLS, a password.

One connection at a time, to the first endpoint that answers; the next one when it fails.
"""

import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc

from kvstore.errors import ConfigError, InvalidRequest, KVStoreError, Unavailable
from node.pb import etcd_pb2 as pb
from node.pb.etcd_pb2_grpc import AuthStub, KVStub, LeaseStub, WatchStub

Result = TypeVar("Result")

CLOSED = "the connection to etcd is closed"
TRY_S = 2.0  # of one endpoint for one answer
KEYS_MAX = 4096  # of one answer
ANSWER_NBYTES_MAX = 64 << 20
# Codes after which another endpoint is tried. Any other code is a refusal by the cluster.
ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # by `_leave` or `close`
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,  # an expired token: another connection gets a new one
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,  # a lease that has just ended
    grpc.StatusCode.OUT_OF_RANGE,  # a revision that was compacted between two answers
}
# gRPC's messages for failed TLS connections, and their meaning.
MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": "etcd's certificate is not valid: it has expired, names another "
    "host, or is not from the authority in etcd_ca",
    "TSI_DATA_CORRUPTED": "etcd does not accept this node's certificate: etcd_cert is not "
    "given, has expired, or is not from the authority that etcd trusts",
    "Handshake read "
    "failed": "etcd does not speak TLS there; leave out etcd_ca, or name another port",
    "connect.*: Socket "
    "closed": "etcd hung up; if it speaks TLS there, name the authority of its certificate "
    "(etcd_ca)",
}


class Entry(NamedTuple):
    """A key's value. `revision`: etcd's, in which it was written."""

    value: bytes
    revision: int
    lease: int


class KeysAtRevision(NamedTuple):
    """All requested keys, as they were at one revision."""

    revision: int
    entries: dict[str, Entry]


class Change(NamedTuple):
    """A change of a key. `entry` None: the key was deleted in this revision."""

    key: str
    entry: Entry | None
    revision: int


@dataclass(frozen=True)
class EtcdCredentials:
    """`ca`, `cert`, `key`: paths of PEM files; without `ca` there is no TLS.

    Without `user`, etcd needs no login.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Read the files and return gRPC credentials.

        Raises ConfigError for those that can not be read, or do not belong together.
        """
        if bool(self.cert) != bool(self.key) or (self.cert and not self.ca):
            raise ConfigError("etcd_cert and etcd_key are given together, and with etcd_ca")
        if not self.ca:
            return None
        try:
            ca, cert, key = (
                Path(path).read_bytes() if path else None for path in (self.ca, self.cert, self.key)
            )
            checked = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                # an empty password, so that OpenSSL does not prompt for one
                checked.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:
            files = ", ".join(path for path in (self.ca, self.cert, self.key) if path)
            raise ConfigError(
                f"TLS to etcd (etcd_ca, etcd_cert, etcd_key): {error}; of {files}"
            ) from error
        return grpc.ssl_channel_credentials(ca, key, cert)


class Etcd:
    """A client of etcd. Thread-safe.

    Raises Unavailable when no endpoint answers, InvalidRequest for a refusal by etcd.
    """

    def __init__(self, endpoints: Sequence[str], access: EtcdCredentials) -> None:
        self.endpoints = list(endpoints)
        # Called before each try; may raise to end the call
        self.pulse: Callable[[], None] = lambda: None
        self._access = access
        access.credentials()  # raises for unusable files
        self._turn = threading.Lock()  # held while connecting
        self._lock = threading.Lock()  # held for microseconds
        self._connection: _Connection | None = None
        self._next = 0
        self._closed = False

    # ---- keys ----------------------------------------------------------------------------

    def read(self, prefix: str) -> KeysAtRevision:
        """Read all keys below a prefix at one revision, in as many replies as needed."""
        request = pb.RangeRequest(key=prefix.encode(), range_end=_behind(prefix), limit=KEYS_MAX)
        entries: dict[str, Entry] = {}
        while True:
            reply = self._ask(lambda connection: connection.kv.Range, request)
            request.revision = request.revision or reply.header.revision
            entries |= {kv.key.decode(errors="replace"): _entry(kv) for kv in reply.kvs}
            if not reply.more or not reply.kvs:
                return KeysAtRevision(request.revision, entries)
            request.key = reply.kvs[-1].key + b"\0"

    def swap(self, key: str, value: bytes, lease: int, revision: int) -> tuple[Entry | None, int]:
        """Write a key if it was last written in `revision` (0: it does not exist).

        Return the entry that is there instead, None if it was written, and etcd's revision.
        """
        name = key.encode()
        same = pb.Compare(target=pb.Compare.MOD, key=name, mod_revision=revision)
        put = pb.RequestOp(request_put=pb.PutRequest(key=name, value=value, lease=lease))
        get = pb.RequestOp(request_range=pb.RangeRequest(key=name))
        request = pb.TxnRequest(compare=[same], success=[put], failure=[get])
        reply = self._ask(lambda connection: connection.kv.Txn, request)
        if reply.succeeded:
            return None, reply.header.revision
        found = reply.responses[0].response_range.kvs
        return (_entry(found[0]) if found else Entry(b"", 0, 0)), reply.header.revision

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        """Yield changes from `revision` on.

        Raises Unavailable if it can not go on: read again then.
        """
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=_behind(prefix), start_revision=revision
        )
        connection = self._connected()
        # Otherwise an endpoint that is cut off from the others is silent
        metadata = (*connection.metadata, ("hasleader", "true"))
        replies = connection.watch.Watch(
            iter([pb.WatchRequest(create_request=create)]), metadata=metadata
        )
        try:
            for reply in replies:
                if reply.canceled:
                    raise Unavailable(
                        "etcd ended the watch: "
                        f"{reply.cancel_reason or 'the revision was compacted'}"
                    )
                yield [_change(event) for event in reply.events]
            raise Unavailable("etcd ended the watch")
        except (grpc.RpcError, ValueError) as error:
            raise Unavailable(f"the watch broke: {_describe(error)}") from error
        finally:
            replies.cancel()

    # ---- leases --------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """Return a new lease and its seconds.

        Raises Unavailable for one that has ended already.
        """
        reply = self._ask(
            lambda connection: connection.lease.LeaseGrant, pb.LeaseGrantRequest(TTL=ttl_s)
        )
        if reply.TTL <= 0:
            raise Unavailable(f"etcd gave a lease of {reply.TTL} s, asked for {ttl_s}")
        return reply.ID, reply.TTL

    def keep_alive(self, lease: int) -> bool:
        """Keep a lease alive; return False if it has ended."""

        def once(connection: "_Connection") -> Callable[..., Any]:
            def call(request: pb.LeaseKeepAliveRequest, **how: Any) -> Any:
                replies = connection.lease.LeaseKeepAlive(iter([request]), **how)
                try:
                    return next(replies, None)
                finally:
                    replies.cancel()

            return call

        reply = self._ask(once, pb.LeaseKeepAliveRequest(ID=lease))
        return reply is not None and reply.TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease, which removes the keys that were written with it."""
        self._ask(lambda connection: connection.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease))

    # ---- connections ---------------------------------------------------------------------

    def close(self) -> None:
        """End all calls and watches."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.channel.close()

    def _ask(self, method: "Callable[[_Connection], Callable[..., Any]]", request: Any) -> Any:
        """Call each endpoint once, and the one used last once more."""
        failed: KVStoreError | None = None
        for _ in range(len(self.endpoints) + 1):
            self.pulse()
            try:
                connection = self._connected()
            except Unavailable as error:
                failed = error
                continue
            try:
                return method(connection)(request, timeout=TRY_S, metadata=connection.metadata)
            except (grpc.RpcError, ValueError) as error:
                failed = Unavailable(f"etcd at {connection.endpoint}: {_describe(error)}")
                if isinstance(error, grpc.RpcError) and error.code() not in ELSEWHERE:
                    raise InvalidRequest(
                        f"etcd at {connection.endpoint} refuses: {_describe(error)}"
                    ) from error
                self._leave(connection)
        assert failed is not None
        raise failed

    def _connected(self) -> "_Connection":
        """Return a connection with the certificates in force now.

        Raises Unavailable after `close`, InvalidRequest for a password that etcd refuses.
        """
        with self._turn:
            with self._lock:
                if self._closed:
                    raise Unavailable(CLOSED)
                if self._connection is not None:
                    return self._connection
                endpoint = self.endpoints[self._next % len(self.endpoints)]
            try:
                connection = _Connection(endpoint, self._access.credentials())
            except ConfigError as error:  # the files are being replaced
                raise Unavailable(str(error)) from error
            try:
                if self._access.user:
                    connection.authenticate(self._access)
            except BaseException:
                connection.channel.close()
                self._next += 1
                raise
            if not self._take(connection):
                connection.channel.close()
                raise Unavailable(CLOSED)
            return connection

    def _take(self, connection: "_Connection") -> bool:
        with self._lock:
            if not self._closed:
                self._connection = connection
            return not self._closed

    def _leave(self, connection: "_Connection") -> None:
        """Close a connection and its watches; the next one goes to another endpoint."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._next += 1
        connection.channel.close()


class _Connection:
    def __init__(self, endpoint: str, credentials: grpc.ChannelCredentials | None) -> None:
        options = [
            ("grpc.max_receive_message_length", ANSWER_NBYTES_MAX),
            # No limit on the size of an answer
            (
                "grpc.compression_enabled_algorithms_bitset",
                1,
            ),
            # starts without the reconnect pause of the previous channel
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        self.endpoint = endpoint
        if credentials is None:
            self.channel = grpc.insecure_channel(endpoint, options)
        else:
            self.channel = grpc.secure_channel(endpoint, credentials, options)
        self.kv = KVStub(self.channel)  # type: ignore[no-untyped-call]
        self.lease = LeaseStub(self.channel)  # type: ignore[no-untyped-call]
        self.watch = WatchStub(self.channel)  # type: ignore[no-untyped-call]
        self.metadata: tuple[tuple[str, str], ...] = ()

    def authenticate(self, access: EtcdCredentials) -> None:
        request = pb.AuthenticateRequest(name=access.user, password=access.password)
        try:
            stub = AuthStub(self.channel)  # type: ignore[no-untyped-call]
            reply = stub.Authenticate(request, timeout=TRY_S)
        except grpc.RpcError as error:
            kind = Unavailable if error.code() in ELSEWHERE else InvalidRequest
            raise kind(
                f"etcd at {self.endpoint}, as user {access.user}: {_describe(error)}"
            ) from error
        self.metadata = (("token", reply.token),)


def _behind(prefix: str) -> bytes:
    """Return the first key after all that begin with the prefix, which ends with `/`."""
    return prefix[:-1].encode() + b"0"


def _entry(kv: pb.KeyValue) -> Entry:
    return Entry(kv.value, kv.mod_revision, kv.lease)


def _change(event: pb.Event) -> Change:
    gone = event.type == pb.Event.DELETE
    return Change(
        event.kv.key.decode(errors="replace"),
        None if gone else _entry(event.kv),
        event.kv.mod_revision,
    )


def _describe(error: grpc.RpcError | ValueError) -> str:
    text = str(
        (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else error
    )
    meant = next((meaning for sign, meaning in MEANINGS.items() if re.search(sign, text)), "")
    return f"{meant} ({text})" if meant else text
