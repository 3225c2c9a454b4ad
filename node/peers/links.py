"""Links from a member to the others: one to each, made when it is first needed, over the bulk wire."""

import threading
from typing import Any

from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.credentials import token_of
from kvstore.errors import Unavailable
from kvstore.link import NodeLink
from kvstore.wires.negotiation import member_name
from node.config import NodeConfig
from node.peers.membership import Membership

CONNECTIONS_MAX = 4  # of each link
TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
BACKOFF_S_MAX = 2.0  # who is back is served soon


def known_by(config: NodeConfig) -> dict[str, Any]:
    """Fields of a ClientConfig for connections to other members: this node's token and its own certificate. Without TLS
    the token leaves this host only if `insecure` says so, whatever addresses the cluster tells. Raises ConfigError for
    a token that can not be used."""
    known: dict[str, Any] = {"token": config.token, "token_file": config.token_file, "insecure": config.insecure}
    token_of(ClientConfig(**known))
    if config.tls_cert:
        known |= {"tls_ca": config.members_ca, "tls_cert": config.tls_cert, "tls_key": config.tls_key}
        known["tls_name"] = config.tls_name
    return known


class PeerLinks:
    """Thread-safe. Links to who is no member any more, or has another address now, are closed."""

    def __init__(self, membership: Membership, config: NodeConfig | None = None) -> None:
        """`config`: of this node, which says how the others know it; None: nobody asks."""
        self._membership = membership
        self._known_by = known_by(config) if config is not None else {}
        self._lock = threading.Lock()  # held for moments
        self._addresses: dict[str, str] = {}  # of the others, by id
        self._ports: dict[str, int] = {}  # where they serve frames, as far as the view says it
        self._links: dict[str, NodeLink] = {}
        self._closed = False
        self._cluster = ""
        membership.on_view(self._follow)

    def link(self, member: str) -> NodeLink:
        """Raises Unavailable for who is no other member."""
        with self._lock:
            address = self._addresses.get(member)
            if address is None or self._closed:
                raise Unavailable(f"{member} is no other member of the cluster")
            link = self._links.get(member)
            if link is None:
                config = ClientConfig(
                    address=address,
                    direct=True,
                    wire="bulk",
                    timeout_s=TIMEOUT_S,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    connections_max=CONNECTIONS_MAX,
                    backoff_s_max=BACKOFF_S_MAX,
                    **self._known_by,
                )
                link = self._links[member] = NodeLink(address, config)
                link.expect(self._ports[member], member_name(self._cluster, member))
            return link

    def failing(self) -> dict[str, bool]:
        """Of each other member, whether calls to it fail, and are not even tried but now and then."""
        with self._lock:
            return {member: member in self._links and self._links[member].failing for member in self._addresses}

    def _follow(self, view: View) -> None:
        own = self._membership.member
        addresses = {member.id: member.address for member in view.members if member.id != own}
        with self._lock:
            left = [name for name, link in self._links.items() if addresses.get(name) != link.address]
            links = [self._links.pop(name) for name in left]
            self._addresses, self._cluster = addresses, view.cluster
            self._ports = {member.id: member.bulk_port for member in view.members}
            for name, link in self._links.items():
                link.expect(self._ports[name], member_name(view.cluster, name))
        for link in links:
            link.close()

    def close(self) -> None:
        """Takes no more calls; those that run may end."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
