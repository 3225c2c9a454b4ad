"""What a near node does beside its own pages: it asks the members of its cluster for what it lacks."""

import time
from collections.abc import Callable, Sequence

from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from node.cluster.remote_pages import RemoteLookup, RemotePages
from node.memory.page import Page
from node.memory.tier import RamTier

FIND_SHARE = 0.5  # of a get's time, to find out who has what; the rest is for fetching it
NEAR_S_MAX = 10.0  # for a get or a lookup that names no time of its own, or more


class Fetching:
    """Of one get: pages that other members have, until `deadline`."""

    def __init__(self, elsewhere: RemotePages, found: RemoteLookup, deadline: Deadline) -> None:
        self._elsewhere = elsewhere
        self._found = found
        self._deadline = deadline
        self.copies = found.copies
        self.end = time.monotonic() + deadline.seconds

    def fetch(self, pages: Sequence[Page], came: Callable[[Page], None], gone: Callable[[], bool]) -> None:
        self._elsewhere.fetch(self._found, pages, came, gone, self._deadline)


class Near:
    """Thread-safe. Costs a node that is alone nothing."""

    def __init__(self, tier: RamTier, elsewhere: RemotePages) -> None:
        self._tier = tier
        self._elsewhere = elsewhere

    def look_further(self, request: pb.LookupRequest, present: list[bool]) -> None:
        """Adds what other members have to what this node said to a lookup."""
        asked = zip(request.prefix_hashes, present, strict=True)
        missing = list(dict.fromkeys(h for h, there in asked if not there))
        namespace = self._tier.namespace(request.namespace).value
        found = self._elsewhere.find(namespace, missing, request.touch, _deadline(request.wait_ms)).routes
        for place, prefix_hash in enumerate(request.prefix_hashes):
            present[place] = present[place] or prefix_hash in found

    def fetching(self, request: pb.GetRequest, prefix_hashes: Sequence[bytes]) -> Fetching | None:
        """What of these pages is not here, and at other members; None if there is nothing to fetch."""
        missing = self._tier.lacking(request.namespace, prefix_hashes)
        if not missing:
            return None
        deadline = _deadline(request.wait_ms)
        namespace = self._tier.namespace(request.namespace).value
        limit = deadline.sooner(deadline.seconds * FIND_SHARE)
        found = self._elsewhere.find(namespace, list(dict.fromkeys(missing)), False, limit)
        return Fetching(self._elsewhere, found, deadline)

    def copies(self, request: pb.PutRequest) -> set[bytes]:
        """Of the pages of a put, those that other members own: what a member hands on is this one's."""
        return set() if request.forwarded_by else self._elsewhere.copies(request.namespace, request.prefix_hashes)


def _deadline(wait_ms: int) -> Deadline:
    return Deadline(min(wait_ms / 1000 or NEAR_S_MAX, NEAR_S_MAX))
