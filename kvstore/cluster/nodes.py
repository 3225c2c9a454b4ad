"""Hold a channel to each node: to a single one, or to the members of a cluster's newest view.

configured addresses --hello--> no view: a single node
                                a view:  a channel per member; each reply tells the newest number
one member --stream of views--> the newest view, and which member is near
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from kvstore.cluster.follower import Follower
from kvstore.cluster.view import State, View, parse_view
from kvstore.config import BULK_SCHEME, PROTOCOL_VERSION, ClientConfig, parse_address, split_address
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import NodeChannel, NodeConnection
from kvstore.transports.negotiation import Addresses, import_grpc_for, member_name
from kvstore.transports.view_stream import Views

log = logging.getLogger(__name__)

NEAR_AGAIN_S = 30.0  # seconds until a near node is searched again where there was none
NEAR_TRIED = 4  # members at this host's addresses that a search connects to
NEAR_SHARE = 0.25  # share of a call's time for each of them


class Near(NamedTuple):
    """The near node of a view.

    `channel`: its channel, or None if there is none. `until`: when to search again.
    """

    view: View
    channel: NodeChannel | None
    until: float


class Nodes:
    """Hold a channel to each node.

    Thread-safe. No address is connected to before a call needs it.

    `only`: the single node, or the first configured one.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._addresses = config.addresses  # as configured
        import_grpc_for(self._addresses)
        self._lock = threading.Lock()  # held for microseconds
        self._channels: dict[str, NodeChannel] = {}  # by address
        self._closed = False
        self._gone = (0, 0)  # connects and failures of channels that were closed
        self._view: View | None = None
        self._members: dict[str, str] = {}  # by address: the id of the member that answered there
        self._near: Near | None = None
        self.only = self._channel(self._addresses[0])
        self._follower = Follower(self._follow, self._take)

    @property
    def view(self) -> View | None:
        """Return the newest view; None before the first call, and for a single node."""
        return self._view

    def found(self, deadline: Deadline) -> View | None:
        """Return the view; request it at the configured addresses if no node has said hello yet.

        Raises the last error if no address answers, and ProtocolError if one of several addresses
        leads to a node without a cluster.
        """
        alone = len(self._addresses) == 1 and self.only.connect_count
        if self._view is None and not alone:
            self._ask(deadline)
        return self._view

    def update_view_if_newer(
        self, connection: NodeConnection, number: int, deadline: Deadline
    ) -> None:
        """Request a member's view if it announced a newer number."""
        view = self._view
        if view is not None and number > view.number:
            hello = connection.wire.call(
                "hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), deadline
            )
            self._take(hello.view)

    # ---- near ----------------------------------------------------------------------------

    @property
    def local_channel(self) -> NodeChannel | None:
        """Return the single node, or the near one if it is known and healthy."""
        if self._view is None:
            return self.only
        channel = self._near.channel if self._near else None
        return None if channel is None or channel.failing or channel.is_older else channel

    def near(self, deadline: Deadline) -> NodeChannel | None:
        """Return the channel to the near member, which is asked for all keys; None without one."""
        view = self.found(deadline)
        if view is None or self._config.near == "none":
            return None
        known = self._near
        if (
            known is None
            or known.view is not view
            or (known.channel is None and time.monotonic() >= known.until)
        ):
            again = time.monotonic() + NEAR_AGAIN_S
            self._near = Near(view, None, again)  # meanwhile other threads do without a near node
            self._near = Near(view, self._nearest(view, deadline), again)
        channel = self._near.channel if self._near else None
        return None if channel is None or channel.is_older else channel

    def _nearest(self, view: View, deadline: Deadline) -> NodeChannel | None:
        named = self._config.near
        if named != "auto":
            if named not in view.by_id:
                log.warning(
                    "near=%s is no member of the cluster %s; asking the owners", named, view.cluster
                )
                return None
            return self.member(view, named)
        if self._config.wire not in ("auto", "shm"):
            return None
        for channel in self._near_candidates(view):
            if not channel.connect_count:
                with contextlib.suppress(KVStoreError):
                    limit = deadline.sooner(deadline.remaining() * NEAR_SHARE)
                    channel.open(None, limit)
            if channel.wire_name == "shm":
                log.info("cluster %s: %s is near", view.cluster, channel.address)
                return channel
        return None

    def _near_candidates(self, view: View) -> Iterator[NodeChannel]:
        """Yield members whose shared memory is in use; then those at addresses of this host."""
        given = {member.id for member in view.members if member.state is not State.DRAINING}
        with self._lock:
            known = [
                channel for at, channel in self._channels.items() if self._members.get(at) in given
            ]
        yield from (channel for channel in known if channel.wire_name == "shm")
        here = [
            some
            for some in view.members
            if some.id in given and is_here(split_address(some.address)[0])
        ]
        yield from (self._channel(member.address) for member in here[:NEAR_TRIED])

    # ---- channels ------------------------------------------------------------------------

    def _ask(self, deadline: Deadline) -> None:
        for number, address in enumerate(self._addresses, 1):
            last, channel = number == len(self._addresses), self._channel(address)
            failures = channel.failure_count
            try:
                limit = deadline if last else Deadline(deadline.remaining() / 2)
                channel.open(None, limit)
            except ProtocolError:
                raise
            except KVStoreError as error:
                # If the count did not grow, the circuit breaker refused the call without trying
                tried = channel.failure_count > failures
                if tried and self._ask_records(address, limit):
                    return
                if last:
                    raise
                log.info("%s: %s; asking %s", address, error, self._addresses[number])
                continue
            if self._view is None and len(self._addresses) > 1:
                raise ProtocolError(
                    f"the node at {address} is in no cluster, but {len(self._addresses)} addresses "
                    "were given; start its node with --cluster, or give one address"
                )
            return

    def _ask_records(self, address: str, deadline: Deadline) -> bool:
        """Return whether one of several addresses behind a name leads to a cluster."""
        for record in _records(address, deadline):
            try:
                self._channel(record).open(None, deadline)
            except KVStoreError as error:
                log.info("%s: %s", record, error)
            if self._view is not None:
                return True
        return False

    def member(self, view: View, member: str) -> NodeChannel:
        """Return the channel to a member of a view, which was the newest when the call began."""
        return self._channel(view.by_id[member].address)

    def all(self) -> dict[str, NodeChannel]:
        """Return the channels by address: of the members, or of the single node."""
        view = self._view
        if view is None:
            return {self.only.address: self.only}
        return {member.address: self._channel(member.address) for member in view.members}

    @property
    def some_fail(self) -> bool:
        """Return whether a node fails while another connected one does not."""
        # Read once: it may change
        known = [(channel.failing, channel.wire_name != "none") for channel in self.all().values()]
        return any(failing for failing, _ in known) and any(
            there and not failing for failing, there in known
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of connections made and of calls that failed."""
        with self._lock:
            connects, failures = self._gone
            channels = list(self._channels.values())
        return connects + sum(channel.connect_count for channel in channels), failures + sum(
            channel.failure_count for channel in channels
        )

    @property
    def closed(self) -> bool:
        """Return whether the client was closed."""
        return self._closed

    def close(self) -> None:
        """Stop following views and close all connections."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        self._follower.close()
        for channel in channels:
            channel.close()

    def _channel(self, address: str) -> NodeChannel:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = NodeChannel(
                    address, self._config, learn=partial(self._learn, address=address)
                )
                if self._closed:
                    channel.close()
                elif self._view is not None:
                    _tell_ports(self._view, {address: channel})
            return channel

    def _learn(self, hello: pb.HelloReply, address: str = "") -> None:
        """Take the view of a hello.

        Raises ProtocolError for an invalid view.
        """
        if hello.HasField("view") and not self._config.direct:
            self._take(hello.view)
            with self._lock:
                self._members[address] = hello.member_id
            self._follower.begin()

    def _follow(self, turn: int, seconds: float) -> Views:
        """Return the views that a member sends, preferably a member with an open connection.

        If no member can be followed, the configured addresses are tried: members may have moved.
        """
        view = self._view
        assert view is not None
        members = [self._channel(member.address) for member in view.members]
        channels = [channel for channel in members if channel.wire_name != "none"] or members
        deadline = Deadline(self._config.timeout_s)
        if turn % (len(channels) + 1) == len(channels):
            channels = [self._channel(address) for address in self._addresses]
            for address in self._addresses:
                channels += [self._channel(record) for record in _records(address, deadline)]
        channel = channels[turn % len(channels)]
        return channel.run(
            lambda connection, limit: connection.negotiated.follow(view.number, seconds, limit),
            None,
            deadline,
        )

    def _take(self, message: pb.View) -> None:
        """Take a view if it is newer.

        Raises ProtocolError for an invalid view.
        """
        try:
            view = parse_view(message)
        except ConfigError as error:
            raise ProtocolError(f"a node sent an invalid view of its cluster: {error}") from error
        with self._lock:
            known = self._view
            if known and known.cluster != view.cluster:
                raise ProtocolError(
                    f"a node belongs to the cluster {view.cluster}, the others to {known.cluster}: "
                    "two clusters have an address in common, or the addresses that were given are "
                    "not of one"
                )
            view = view.with_ports(known)
            # Views of fixed lists share one number: the last one wins
            if known and (known.number > view.number or known == view):
                return
            self._view = view.after(known)
            addresses = {member.address for member in view.members} | {*self._addresses}
            _tell_ports(view, self._channels)
            left = [
                self._channels.pop(known_at)
                for known_at in list(self._channels)
                if known_at not in addresses
            ]
            self._members = {at: member for at, member in self._members.items() if at in addresses}
            self._gone = (
                self._gone[0] + sum(channel.connect_count for channel in left),
                self._gone[1] + sum(channel.failure_count for channel in left),
            )
        log.info(
            "cluster %s: view %d with %d members", view.cluster, view.number, len(view.members)
        )
        for channel in left:
            channel.close()


def _tell_ports(view: View, channels: Mapping[str, NodeChannel]) -> None:
    """Tell channels their members' bulk ports, so that they need no hello over gRPC first."""
    for member in view.members:
        channel = channels.get(member.address)
        if channel is not None:
            channel.expect(member.bulk_port, member_name(view.cluster, member.id))


def is_here(host: str) -> bool:
    """Return whether a host name or address is this host's, without asking a name server.

    An empty name is a Unix socket's.
    """
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
        ) as sock:
            socket.inet_pton(sock.family, host)  # an address, not a name: a name would be looked up
            sock.bind((host, 0))
    except OSError:
        return False
    return True


def _records(address: str, deadline: Deadline) -> list[str]:
    """Return the addresses of a name if they are several hosts, not one host's IPv4 and IPv6."""
    at = parse_address(address)
    if at.scheme == "unix":
        return []
    try:
        found = Addresses(at.host).resolve(deadline)
    except KVStoreError:
        return []
    scheme = BULK_SCHEME if at.scheme == "bulk" else ""
    six, four = [one for one in found if ":" in one], [one for one in found if ":" not in one]
    several = max(len(six), len(four)) > 1
    return (
        [f"{scheme}{one}:{at.port}" for one in [*four, *(f"[{some}]" for some in six)]]
        if several
        else []
    )
