"""The nodes that a client talks to: one that is alone, or the members of a cluster as the newest view has them.

addresses that were given --hello--> a view, or none --> a link per member, which tells of newer views
"""

import logging
import threading

from kvstore.cluster.view import View, parse_view
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.link import NodeLink
from kvstore.pb import kvstore_pb2 as pb

log = logging.getLogger(__name__)


class Nodes:
    """Thread-safe. No address is connected to before a call needs it. `only`: the node that is alone, or the first one
    that was named."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._lock = threading.Lock()  # held for moments
        self._links: dict[str, NodeLink] = {}  # by address
        self._closed = False
        self._gone = (0, 0)  # connects and failures of links that are no more
        self._view: View | None = None
        self.only = self._link(config.addresses[0])

    @property
    def view(self) -> View | None:
        """None: before the first call, and with a node that is alone."""
        return self._view

    def found(self, deadline: Deadline) -> View | None:
        """The view, asked for at the addresses that were given if nobody has said hello yet. Raises what the last of
        them raised if none answers, ProtocolError for several addresses of which one's node is alone."""
        alone = len(self._config.addresses) == 1 and self.only.connect_count
        if self._view is None and not alone:
            self._ask(deadline)
        return self._view

    def _ask(self, deadline: Deadline) -> None:
        addresses = self._config.addresses
        for number, address in enumerate(addresses):
            last = number == len(addresses) - 1
            try:
                limit = deadline if last else Deadline(deadline.remaining() / 2)
                self._link(address).run(lambda link, limit: None, None, limit)
            except ProtocolError:
                raise
            except KVStoreError as error:
                if last:
                    raise
                log.info("%s: %s; asking %s", address, error, addresses[number + 1])
                continue
            if self._view is None and not (number == 0 and last):
                raise ProtocolError(
                    f"the node at {address} is in no cluster, but {len(addresses)} addresses were given; "
                    "start its node with --cluster, or name the one node"
                )
            return

    def member(self, view: View, member: str) -> NodeLink:
        """The link to a member of a view, which may have been the newest only when a call began."""
        return self._link(view.by_id[member].address)

    def all(self) -> dict[str, NodeLink]:
        """By address: the members, or the node that is alone."""
        view = self._view
        if view is None:
            return {self.only.address: self.only}
        return {member.address: self._link(member.address) for member in view.members}

    @property
    def counts(self) -> tuple[int, int]:
        """Connections made and calls that failed."""
        with self._lock:
            connects, failures = self._gone
            links = list(self._links.values())
        return connects + sum(link.connect_count for link in links), failures + sum(
            link.failure_count for link in links
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close()

    def _link(self, address: str) -> NodeLink:
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = NodeLink(address, self._config, learn=self._learn)
                if self._closed:
                    link.close()
            return link

    def _learn(self, hello: pb.HelloReply) -> None:
        """Raises ProtocolError for a view that can not be."""
        if not hello.HasField("view") or self._config.direct:
            return
        try:
            view = parse_view(hello.view)
        except ConfigError as error:
            raise ProtocolError(f"a node told of a cluster that can not be: {error}") from error
        with self._lock:
            known = self._view
            if known and known.cluster != view.cluster:
                raise ProtocolError(
                    f"a node belongs to the cluster {view.cluster}, the others to {known.cluster}: "
                    "two clusters have an address in common, or the addresses that were given are not of one"
                )
            if known and (known.number > view.number or known == view):  # fixed lists have one number: the last told
                return
            self._view = view
            addresses = {member.address for member in view.members} | {*self._config.addresses}
            left = [self._links.pop(address) for address in list(self._links) if address not in addresses]
            self._gone = (
                self._gone[0] + sum(link.connect_count for link in left),
                self._gone[1] + sum(link.failure_count for link in left),
            )
        log.info("cluster %s: view %d with %d members", view.cluster, view.number, len(view.members))
        for link in left:
            link.close()
