"""What a member is asked about its cluster: which pages a member owns, to sweep, to drain."""

from collections.abc import Callable

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from node.peers.peers import Peers


class ClusterCalls:
    """Thread-safe. Each raises InvalidRequest at a node that is alone."""

    def __init__(self, peers: Peers) -> None:
        self._membership = peers.membership
        self._sweeper = peers.sweeper
        self._draining = peers.draining

    def drain(self, request: pb.DrainRequest, caller: object) -> pb.DrainReply:
        self._check("drained")
        progress = self._draining.end() if request.end else self._draining.begin()
        return pb.DrainReply(over=progress.over, pages_left=progress.left, pages_handed=progress.handed)

    def sweep(self, request: pb.SweepRequest, caller: object) -> pb.SweepReply:
        self._check("filled by others")
        if not request.dry:
            self._sweeper.sweep_in(0.0)
            return pb.SweepReply()
        report = self._sweeper.dry()
        return pb.SweepReply(pages_missing=report.missing, nbytes_missing=report.missing_nbytes, away=report.away)

    def owned(self, request: pb.ListRequest) -> Callable[[list[bytes]], list[bytes]]:
        """Which of some hashes a list asks for: all, or those that a member owns."""
        if not request.owner:
            return list
        view = self._membership.view
        if view is None or request.owner not in view.by_id:
            raise InvalidRequest(f"{request.owner!r} is no member that this node knows of; see `kvstore cluster`")

        def owned(hashes: list[bytes]) -> list[bytes]:
            owners = view.owners.owners(request.namespace, hashes)
            return [prefix_hash for prefix_hash, some in zip(hashes, owners, strict=True) if request.owner in some]

        return owned

    def _check(self, what: str) -> None:
        if self._membership.view is None:
            raise InvalidRequest(f"a node that is in no cluster can not be {what}; start it with --cluster")
