"""What an operator should know and do, from what the node says of itself."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.cli.hints import hints
from kvstore.cluster.view import REGISTRIES
from kvstore.messages import namespace_value
from kvstore.pb import kvstore_pb2 as pb

WARN, FAIL = "warn", "fail"
NEAR_END_S = 7 * 24 * 3600  # of a certificate
COMPARED_MAX = 64  # namespaces


class Finding(NamedTuple):
    """`remedy`: what to do; empty: it is in what was found."""

    name: str
    state: str
    found: str
    remedy: str = ""


def findings(status: pb.NodeStatusReply) -> list[Finding]:
    return [*_of_node(status), *_of_disk(status), *_of_tls(status.tls), *_of_peers(status.peers), *_of_hits(status)]


def _of_node(status: pb.NodeStatusReply) -> Iterator[Finding]:
    if status.insecure:
        yield Finding("insecure", WARN, status.insecure, "docs/SECURITY.md")
    if status.state == "DRAINING":
        yield Finding("state", WARN, "it drains, and takes no new pages")


def _of_disk(status: pb.NodeStatusReply) -> Iterator[Finding]:
    disk = status.disk
    if status.HasField("disk") and disk.state != "SERVING":
        yield Finding("disk", FAIL, f"it is stopped: {disk.reason}", "mend the cause, then: kvstore recover")
    if disk.pages_corrupt:
        found = f"{disk.pages_corrupt:,} pages were damaged on disk since the start, and dropped"
        yield Finding("disk", FAIL, found, "the medium changes what was written; replace it")


def _of_tls(tls: pb.TlsStatus) -> Iterator[Finding]:
    if tls.problem:
        yield Finding("TLS", FAIL, f"the files as they are now are not in force: {tls.problem}", "correct them")
    for one in tls.certificates:
        left_s = one.ends_unix_s - time.time()
        if left_s <= 0:
            yield Finding("TLS", FAIL, f"{one.setting} has expired", "renew it")
        elif left_s < NEAR_END_S:
            yield Finding("TLS", WARN, f"{one.setting} expires in {left_s / 3600:.0f} h", "renew it")


def _of_peers(peers: pb.PeersStatus) -> Iterator[Finding]:
    if peers.registry not in ("", *REGISTRIES):
        yield Finding("registry", WARN, f"it can not be asked {peers.registry}", "the last view is kept meanwhile")
    for line in peers.apart:
        yield Finding("members", WARN, f"not of the view: {line}")
    if peers.pages_dropped:
        found = f"{peers.pages_dropped:,} pages were not handed to their owners since the start"
        yield Finding("members", WARN, found, "a member is away, full, or slower than the puts; a sweep fetches them")


def _of_hits(status: pb.NodeStatusReply) -> Iterator[Finding]:
    """Of those with most pages, or questions, which are what others are compared with."""
    chosen: Sequence[pb.NamespaceInfo] = sorted(
        status.namespaces, key=lambda info: -(info.page_count + info.counters.pages_asked)
    )[:COMPARED_MAX]
    for hint in hints([(namespace_value(info.namespace), info) for info in chosen]):
        yield Finding("hits", WARN, hint)
