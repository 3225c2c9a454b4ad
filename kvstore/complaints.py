"""What is wrong with pages that nodes sent: counted, logged, and told to the node, which can do something about it."""

import logging

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
        if found.corrupt:
            self._report_corrupt(found.corrupt, link, namespace, deadline)
        if found.forged:
            self._report_forged(found.forged, link, namespace, deadline)

    def _report_corrupt(self, prefix_hashes: list[bytes], link: Link, namespace: Namespace, deadline: Deadline) -> None:
        """The node checks its copies and drops bad ones."""
        self.corrupt_pages += len(prefix_hashes)
        log.error(
            "%d pages of namespace %s did not match their checksum; treated as misses",
            len(prefix_hashes),
            namespace.digest.hex(),
        )
        try:
            distinct = list(dict.fromkeys(prefix_hashes))
            request = pb.VerifyRequest(namespace=namespace.digest, prefix_hashes=distinct)
            link.control.call("verify", request, deadline)
        except KVStoreError as error:
            log.warning("could not report corrupt pages: %s", error)

    def _report_forged(self, prefix_hashes: list[bytes], link: Link, namespace: Namespace, deadline: Deadline) -> None:
        """The node removes them, or they would be in the way of the true ones for good. Who has the key did not make
        them: the namespace's name says which key that is."""
        self.forged_pages += len(prefix_hashes)
        log.error(
            "%d pages of namespace %s were made or changed by somebody who has not its key; treated as misses",
            len(prefix_hashes),
            namespace.digest.hex(),
        )
        try:
            distinct = list(dict.fromkeys(prefix_hashes))
            request = pb.RemoveRequest(namespace=namespace.digest, prefix_hashes=distinct)
            link.control.call("remove", request, deadline)
        except KVStoreError as error:
            log.warning("could not have forged pages removed: %s", error)
