"""What is wrong with pages that nodes sent: counted, logged, and told to the node, which can do something about it."""

import logging
from typing import Any

from kvstore.calls import Found
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.link import Link
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb

log = logging.getLogger(__name__)
log.addFilter(LogRate())


class Complaints:
    """Of one client. Whatever a node says to a complaint, the read was a miss."""

    def __init__(self) -> None:
        self.corrupt_pages = 0
        self.forged_pages = 0

    def about(self, found: Found, link: Link, namespace: Namespace, deadline: Deadline) -> None:
        """The node checks its copies of corrupt pages and drops bad ones. Forged ones it removes, or they would be in
        the way of the true ones for good: the namespace's name says which key it is that their maker has not."""
        named = namespace.digest.hex()
        if corrupt := found.corrupt:
            self.corrupt_pages += len(corrupt)
            log.error("%d pages of namespace %s did not match their checksum; treated as misses", len(corrupt), named)
            check = pb.VerifyRequest(namespace=namespace.digest, prefix_hashes=_distinct(corrupt))
            _complain(link, "verify", check, deadline)
        if forged := found.forged:
            self.forged_pages += len(forged)
            log.error(
                "%d pages of namespace %s were made or changed by somebody who has not its key; treated as misses",
                len(forged),
                named,
            )
            removal = pb.RemoveRequest(namespace=namespace.digest, prefix_hashes=_distinct(forged))
            _complain(link, "remove", removal, deadline)


def _distinct(prefix_hashes: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(prefix_hashes))


def _complain(link: Link, op: str, request: Any, deadline: Deadline) -> None:
    try:
        link.wire.call(op, request, deadline)
    except KVStoreError as error:
        log.warning("could not have the node %s such pages: %s", op, error)
