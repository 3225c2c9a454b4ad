"""What an operator should know and do: what `kvstore doctor` would say of what a node tells of itself.

It looks from the node. What a client's host, its settings and its way to the node are like, the command looks at.
"""

from collections.abc import Iterator, Sequence

from kvstore.cluster.view import REGISTRIES
from kvstore.doctor.finding import Finding, State, warn
from kvstore.doctor.hints import hints
from kvstore.doctor.member import state, told
from kvstore.messages import namespace_value
from kvstore.pb import kvstore_pb2 as pb

COMPARED_MAX = 64  # namespaces


def findings(status: pb.NodeStatusReply) -> list[Finding]:
    """What is not as it should be."""
    of_node = told(status) if status.HasField("ram") else ()
    found = [state(status), *of_node, *_of_peers(status.peers), *_of_hits(status)]
    return [finding for finding in found if finding.state in (State.WARN, State.FAIL)]


def _of_peers(peers: pb.PeersStatus) -> Iterator[Finding]:
    if peers.registry not in ("", *REGISTRIES):
        yield warn("registry", f"it can not be asked: {peers.registry}", "the last view is kept meanwhile")
    for line in peers.apart:
        yield warn("members", f"not of the view: {line}", "")
    if peers.pages_dropped:
        found = f"{peers.pages_dropped:,} pages were not handed to their owners since the start"
        yield warn("members", found, "a member is away, full, or slower than the puts; a sweep fetches them")


def _of_hits(status: pb.NodeStatusReply) -> Iterator[Finding]:
    """Of those with most pages, or questions, which are what others are compared with."""
    chosen: Sequence[pb.NamespaceInfo] = sorted(
        status.namespaces, key=lambda info: -(info.page_count + info.counters.pages_asked)
    )[:COMPARED_MAX]
    for hint in hints([(namespace_value(info.namespace), info) for info in chosen]):
        yield warn("hits", hint, "")
