"""Know the cluster of a node, its members, and the view that clients receive."""

import contextlib
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.cluster.view import State, View, check_name, static_view
from kvstore.config import (
    BULK_SCHEME,
    ClientConfig,
    check_no_url,
    explicit_config,
    is_loopback,
    parse_address,
    split_address,
)
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError, ProtocolError, Unavailable
from kvstore.keys import NAMESPACE_DIGEST_NBYTES
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.secrets import check_stays_private, token_of, write_whole
from kvstore.transports.bulk import BulkConnector
from kvstore.transports.connections import Refused
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.negotiation import Addresses, grpc_target
from kvstore.transports.tls import PROBE_S, client_tls, explain_unreachable

# A node's identity in its cluster, kept over restarts: `member.json` in its data directory.
#
# The token tells a restart of this directory's node from another node with the same id.

FILE_NAME = "member.json"
TOKEN_NBYTES = 8
_DIGEST = re.compile(f"[0-9a-f]{{{2 * NAMESPACE_DIGEST_NBYTES}}}")
# How long etcd keeps the removal of a namespace. A member that was away for longer may have pages
# that must never be served again.
REMOVALS_KEPT_S = 30 * 24 * 3600
# tolerated: the file's date comes from a file server, whose clock may be ahead
AHEAD_S_MAX = 3600.0
NUMBER_MAX = 1 << 63  # a view's number is etcd's revision plus a base, each below half of this


class Identity:
    """A node's identity in its data directory.

    `applied` is the newest view number whose removals were carried out here; `to_erase` lists
    removed namespaces whose rows and keys are still to be erased; `settings_id` is that of the
    cluster's settings in etcd at that time. Without a data directory the node has a new identity
    after each start. Raises ConfigError.
    """

    def __init__(self, data_dir: str, cluster: str, member: str) -> None:
        self._path = Path(data_dir) / FILE_NAME if data_dir else None
        known = self._read(cluster)
        self.cluster = cluster
        self.token = str(known.get("token") or secrets.token_hex(TOKEN_NBYTES))
        self.applied = int(known.get("applied") or 0)
        self.to_erase = [bytes.fromhex(text) for text in known.get("to_erase", ())]
        self.settings_id = str(known.get("settings_id") or "")
        own = str(known.get("member") or "")
        if member and own and member != own:
            raise ConfigError(
                f"member={member}, but data_dir={data_dir} is that of {own}; start it as {own}, or "
                f"with a data_dir of its own, or remove {self._path} if its pages are to be "
                f"{member}'s"
            )
        if not (member or own or data_dir):
            raise ConfigError(
                "a node without data_dir has no persistent id; set it with member (--member)"
            )
        self.member = member or own or f"n{self.token}"
        check_name("member", self.member)

    def _read(self, cluster: str) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            known = json.loads(self._path.read_text())
            written_s = self._path.stat().st_mtime
            if not isinstance(known, dict) or not _are_numbers(known) or not _are_digests(known):
                raise ValueError("no node wrote it")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} can not be read: {error}; remove it, and name the node's id"
            ) from error
        if known.get("cluster") != cluster:
            raise ConfigError(
                f"data_dir belongs to a member of the cluster {known.get('cluster')}, not of "
                f"{cluster}; give another data_dir, or remove {self._path} if its pages are to move"
            )
        # A copy from a backup has a new modification time; the time in the file is then the older
        # one.
        age_s = time.time() - min(written_s, known.get("saved_s", written_s))
        if age_s > REMOVALS_KEPT_S:
            raise ConfigError(
                f"this node was away for {age_s / 86400:.0f} days, and removals are "
                f"remembered for {REMOVALS_KEPT_S // 86400}: it may have pages that were "
                "removed meanwhile; empty data_dir"
            )
        if age_s < -AHEAD_S_MAX:
            raise ConfigError(
                f"{self._path} is dated {-age_s / 86400:.1f} days in the future by this host's "
                "clock, so it is unknown how long this node was away; correct the clock, or empty "
                "data_dir if it was ahead then"
            )
        return known

    def save(self, applied: int, to_erase: Sequence[bytes] = (), settings_id: str = "") -> None:
        """Save the identity, and note that this node is present now. Raises OSError."""
        self.applied, self.to_erase, self.settings_id = applied, list(to_erase), settings_id
        if self._path is None:
            return
        known: dict[str, Any] = {
            "cluster": self.cluster,
            "member": self.member,
            "token": self.token,
        }
        known |= {
            "saved_s": int(time.time()),
            "applied": applied,
            "to_erase": [digest.hex() for digest in self.to_erase],
            "settings_id": settings_id,
        }
        write_whole(self._path, json.dumps(known).encode(), 0o600)


def _are_numbers(known: dict[str, Any]) -> bool:
    """Return whether `applied` and `saved_s` are in range for a view's number and a time."""
    found = known.get("applied", 0), known.get("saved_s", 0)
    return all(isinstance(number, int) and 0 <= number < NUMBER_MAX for number in found)


def _are_digests(known: dict[str, Any]) -> bool:
    """Return whether the namespaces to erase are valid digests."""
    found = known.get("to_erase", [])
    return isinstance(found, list) and all(
        isinstance(text, str) and _DIGEST.fullmatch(text) for text in found
    )


# The address under which the others reach this node: configured or guessed, and tried before it is
# published.

WILDCARDS = ("", "0.0.0.0", "::")
TRY_S = 2.0
TRIED_S = 5.0
PAUSE_S = 0.2


def advertised(
    configured: str, host: str, port: int, towards: Sequence[str], scheme: str = ""
) -> str:
    """Return the address that a node advertises.

    It is `configured`, with this node's port if it has none; else the address on which the node
    listens; else the one from which this host reaches one of `towards`. `scheme` is that of `port`,
    empty for gRPC.
    """
    if configured:
        return with_port(configured, port, scheme)
    if host in WILDCARDS:
        host = _own_address(towards)
    return scheme + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def with_port(configured: str, port: int, scheme: str = "") -> str:
    """Add this node's port and scheme to an address without a port. Raises ConfigError."""
    if configured.startswith(BULK_SCHEME):
        split_address(configured)
        return configured
    check_no_url("advertise", configured)
    named = configured.rpartition(":")[2].isdigit() and (
        configured.count(":") == 1 or "]:" in configured
    )
    # A bare IPv6 address, as Kubernetes passes it to a pod
    bare = configured.count(":") > 1 and not configured.startswith("[")
    address = (
        configured
        if named
        else scheme + (f"[{configured}]:{port}" if bare else f"{configured}:{port}")
    )
    try:
        split_address(address)
    except ConfigError as error:
        raise ConfigError(f"advertise={configured!r} is not host:port") from error
    return address


def _own_address(towards: Sequence[str]) -> str:
    """Return the address that this host uses towards others; connecting UDP sends nothing."""
    for address in towards:
        host, port = split_address(address)
        with contextlib.suppress(OSError):
            for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
                    sock.connect(where)
                    return str(sock.getsockname()[0])
    raise ConfigError(
        "no address of this host is known to be reachable for others; set one with "
        "advertise (--advertise)"
    )


def check_listens(host: str, address: str) -> None:
    """Raise ConfigError for a member that listens on loopback but advertises another address."""
    named = split_address(address)[0]
    with contextlib.suppress(ValueError):  # a name is left to the resolver
        if is_loopback(host) and not ipaddress.ip_address(named).is_loopback:
            raise ConfigError(
                f"others reach this member at {address}, and with host={host} it listens for its "
                f"own host only; name an address to listen on (--host {named}, or 0.0.0.0), with "
                "TLS and identities (docs/SECURITY.md)"
            )


def check_address(
    address: str,
    instance_id: bytes,
    pulse: Callable[[], None],
    peer_credentials: Mapping[str, Any] | None = None,
) -> None:
    """Check that this node answers at its advertised address.

    `peer_credentials` holds fields of a ClientConfig. Raises ConfigError if another node answers,
    or none within TRIED_S.
    """
    end = time.monotonic() + TRIED_S
    remedy = "set one that the others can reach, with advertise (--advertise HOST:PORT)"
    while True:
        pulse()
        try:
            found = _instance_at(explicit_config(address=address, **(peer_credentials or {})))
            break
        except KVStoreError as error:
            if isinstance(error, (ProtocolError, ConfigError)) or time.monotonic() >= end:
                raise ConfigError(
                    f"this node does not reach itself at {address}: {error}; {remedy}"
                ) from error
            time.sleep(PAUSE_S)
    if found != instance_id:
        raise ConfigError(f"at {address} another node answers, not this one; {remedy}")


def instance_at(address: str, peer_credentials: Mapping[str, Any]) -> bytes:
    """Return the instance id of the node at an address, empty if none answers within TRY_S.

    `peer_credentials` as above.
    """
    try:
        return _instance_at(explicit_config(address=address, **peer_credentials))
    except KVStoreError:
        return b""


def _instance_at(config: ClientConfig) -> bytes:
    scheme, host, port, _ = parse_address(config.address)
    limit = Deadline(TRY_S)
    tls, found = client_tls(config, host), Addresses(host).resolve(limit)
    token = token_of(config)
    check_stays_private(token, config, found)
    if scheme == "bulk":
        return _instance_by_frames(BulkConnector(host, port, config, found, tls), limit)
    wire = GrpcWire(grpc_target(found, port), config.address, tls, token)
    try:
        return bytes(wire.call("hello", pb.HelloRequest(), limit).instance_id)
    except Unavailable as error:
        if text := explain_unreachable(found, port, tls, PROBE_S):
            raise Unavailable(text) from error
        raise
    finally:
        wire.close()


def _instance_by_frames(connector: BulkConnector, limit: Deadline) -> bytes:
    try:
        connection, hello = connector.connect(limit, only_asks=True)
    except Refused as error:
        raise error.error from None
    except OSError as error:
        raise Unavailable(f"connection to {connector.where} failed: {error}") from error
    connection.close()
    return bytes(hello.instance_id)


ETCD_SCHEME = "etcd://"
Listener = Callable[[View], None]


class LostMember(NamedTuple):
    """A member that left without a drain.

    `lost_s`: Unix time at which that was noticed; 0: not yet.
    """

    id: str
    address: str
    weight: float
    lost_s: int = 0
    zone: str = ""

    def value(self) -> bytes:
        """Serialise the record."""
        about = self._asdict()
        del about["id"]
        return json.dumps(about).encode()


class Membership:
    """Membership of this node in a cluster. Thread-safe.

    `view` None: the node has no cluster, or is `joining`. Raises ConfigError for impossible
    settings.
    """

    def __init__(self, cluster: str, member: str, replicas: int = 0) -> None:
        """Prepare the membership. `replicas` is that of a fixed list; 0 means 1."""
        self.member = member
        # There is no view yet, but the node must not look like one without a cluster
        self.joining = cluster.startswith(ETCD_SCHEME)
        self.view: View | None = None
        if cluster and not self.joining:
            self.view = _listed(cluster, replicas)
        # State of the registry, and members outside the view
        self.registry: Callable[[], tuple[str, list[str]]] = lambda: ("static", [])
        # Members that left without a drain; a fixed list has none
        self.lost: Callable[[], Sequence[LostMember]] = lambda: ()
        self.forget_lost: Callable[[str], None] | None = None
        # Called with the lost members and the registered ones after each change of the registry
        self.on_lost: Callable[[Sequence[LostMember], Collection[str]], None] = (
            lambda lost, registered: None
        )
        self.announcer: Callable[[State], None] | None = None  # None: a fixed list
        self._announced: State | None = None
        # Held while listeners are called, so that the last view that a listener gets is the newest
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        if not cluster and (member or replicas):
            named = f"member={member}" if member else f"replicas={replicas}"
            raise ConfigError(f"{named} is set without a cluster; set --cluster, or leave it out")
        if self.view and member not in self.view.by_id:
            known = ", ".join(sorted(self.view.by_id))
            raise ConfigError(
                f"member={member!r} is not of the cluster {self.view.cluster}; its members are "
                f"{known}; say which of them this node is (--member)"
            )

    @property
    def in_cluster(self) -> bool:
        """Return whether the node is a member, or joins."""
        return self.joining or self.view is not None

    def become(self, view: View, member: str = "") -> None:
        """Set a new view, and perhaps this node's member id, and notify the listeners."""
        with self._lock:
            self.member = member or self.member
            self.view = view
            self.joining = False
            for listener in self._listeners:
                listener(view)

    def serve_frames(self, bulk_port: int) -> None:
        """Add this node's frame port to the view of a fixed list."""
        view = self.view
        if view is not None:
            own = replace(view.by_id[self.member], bulk_port=bulk_port)
            self.become(
                replace(
                    view, members=tuple(own if some.id == own.id else some for some in view.members)
                )
            )

    def on_view(self, listener: Listener) -> None:
        """Call a listener with the current view and every later one; it must not block."""
        with self._lock:
            self._listeners.append(listener)
            if self.view is not None:
                listener(self.view)

    def forget(self, listener: Listener) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.remove(listener)

    def announce(self, state: State) -> None:
        """Announce this member's state.

        Raises InvalidRequest for a fixed list of members.
        """
        if self.announcer is None:
            raise InvalidRequest(
                f"the members of a fixed list stay as they are; {self.member} can not become "
                f"{state.name}; stop it, and start the others with a list without it, or use etcd"
            )
        self._announced = state
        self.announcer(state)

    def joined(self) -> None:
        """Announce that this member serves, unless another state was announced meanwhile."""
        if self._announced is None:
            self.announce(State.SERVING)

    def add_view(self, hello: pb.HelloReply) -> None:
        """Add the view to a hello. Raises Unavailable while there is none yet."""
        if self.joining:
            raise Unavailable(
                "this node is joining its cluster; ask another member, or again in a moment"
            )
        view = self.view
        if view is not None:
            hello.view.CopyFrom(view.message)
            hello.member_id = self.member


def _listed(cluster: str, replicas: int) -> View:
    view = replace(static_view(cluster), replicas=replicas or 1)
    if view.replicas > len(view.members):
        raise ConfigError(
            f"replicas={replicas}, but the cluster {view.cluster} has {len(view.members)} members; "
            "list more of them, or ask for fewer replicas"
        )
    return view
