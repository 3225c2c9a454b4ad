"""Describe every metric and limit of a node, for `# HELP` and docs/reference."""

from typing import NamedTuple

from kvstore.config import GET_PIECES_MAX, GET_RANGES_MAX
from node.serving import limits

MIB = 1 << 20

# Section of the reference -> metric, as Prometheus stores it -> its text.
SECTIONS: dict[str, dict[str, str]] = {
    "Requests": {
        "kvstore_request_seconds": "Time from a complete request to the end of its answer; "
        "failed requests are not in it",
        "kvstore_request_errors_total": "Requests that failed, by the status code of the answer",
        "kvstore_get_seconds": "Time until all pages of a get are in RAM, by the farthest tier "
        "that had one of them",
        "kvstore_gets_waiting": "Gets that wait for pages now, by tier",
        "kvstore_calls_waiting": "Calls that wait for another call of the same peer",
        "kvstore_wire_bytes_total": "Page bytes that clients wrote (in) or read (out)",
        "kvstore_sessions": "Bulk connections and gRPC transfers",
        "kvstore_refused_calls_total": "Calls without a valid identity, role or tenant",
    },
    "Node and RAM": {
        "kvstore_serving": "1 while the node accepts new pages, 0 while it drains",
        "kvstore_insecure": "1 if callers without authentication have access",
        "kvstore_tls": "1 if the TCP ports use TLS",
        "kvstore_certificate_expiry_seconds": "Unix time at which a certificate expires, by the "
        "setting that names its file",
        "kvstore_private_bytes": "Resident memory of the node without pages and gateways",
        "kvstore_ram_capacity_bytes": "Size of the RAM tier",
        "kvstore_ram_used_bytes": "Bytes of slots that hold a page",
        "kvstore_ram_huge_bytes": "Bytes of the RAM tier in huge pages",
        "kvstore_ram_free_extents": "Extents without a page size",
        "kvstore_ram_pages": "Pages that a lookup can find",
        "kvstore_ram_writing_pages": "Pages that are being written or loaded",
        "kvstore_ram_held_pages": "Pages that a reader holds",
        "kvstore_ram_pinned_pages": "Pinned pages",
        "kvstore_ram_retained_pages": "Pages that a hint keeps longer, or gives away sooner",
        "kvstore_hint_pages_total": "Pages named in hints, by action and answer",
        "kvstore_hint_sessions": "Sessions whose pages are remembered",
        "kvstore_hint_sessions_forgotten_total": "Sessions that were forgotten for newer ones",
        "kvstore_prefetching_hints": "Chains that wait to be fetched ahead",
        "kvstore_shm_clients": "Connections of the shared-memory wire",
        "kvstore_shm_orphan_pages": "Pages of lost connections whose process may still write",
    },
    "Gateways": {
        "kvstore_gateways_ready": "Gateway processes that serve gRPC",
        "kvstore_gateway_resident_bytes": "Resident memory of a gateway; it ends above "
        "--grpc-memory-bytes",
        "kvstore_gateway_ends_total": "Gateways that ended and were restarted: memory, hung, "
        "killed or failed",
    },
    "Disk": {
        "kvstore_disk_serving": "0 while the disk tier is stopped",
        "kvstore_disk_capacity_bytes": "Size of the disk tier",
        "kvstore_disk_usable_bytes": "Part of it for which the file system has space",
        "kvstore_disk_used_bytes": "Bytes of slots that hold a page",
        "kvstore_disk_pages": "Pages on disk",
        "kvstore_disk_queue_bytes": "Bytes in RAM that wait to be written",
        "kvstore_disk_queue_bytes_max": "Capacity of that queue, --disk-queue-bytes",
        "kvstore_disk_filesystem_free_bytes": "Free bytes of the file system of --data-dir",
        "kvstore_disk_filesystem_bytes": "Size of that file system",
        "kvstore_disk_pages_written_total": "Pages written",
        "kvstore_disk_bytes_written_total": "Bytes of pages written",
        "kvstore_disk_pages_read_total": "Whole pages read into RAM",
        "kvstore_disk_pages_read_in_part_total": "Pages of which ranges were read",
        "kvstore_disk_bytes_read_total": "Bytes of pages and ranges read",
        "kvstore_disk_pages_evicted_total": "Pages evicted for newer ones",
        "kvstore_disk_pages_corrupt_total": "Pages dropped because their checksum did not match",
        "kvstore_disk_pages_refused_total": "Pages that stayed in RAM only, because the queue or "
        "the disk was full",
        "kvstore_disk_pages_scrubbed_total": "Pages that the background check verified",
        "kvstore_disk_no_space_errors_total": "Writes that found that file system full",
    },
    "Cluster": {
        "kvstore_peers_lost": "members that left without a drain and did not return",
        "kvstore_pages_under_replicated": "pages with too few copies that this member fetches, or "
        "could not hand on",
        "kvstore_peers_failing": "1 while the circuit breaker of a member is open",
        "kvstore_peers_registry_serving": "0 while etcd does not answer",
        "kvstore_peers_view_number": "Number of the view that this member uses",
        "kvstore_peers_replicas": "Owners of a key",
        "kvstore_peers_queue_pages": "Pages that wait to be replicated",
        "kvstore_peers_queue_bytes": "Their bytes",
        "kvstore_peers_queue_bytes_max": "Capacity of that queue, --hand-over-queue-bytes",
        "kvstore_peers_pages_handed_total": "Pages that another member accepted or had",
        "kvstore_peers_bytes_handed_total": "Their bytes",
        "kvstore_peers_pages_dropped_total": "Pages that were not replicated",
        "kvstore_peers_pages_fetched_total": "Pages fetched from other members for readers",
        "kvstore_peers_bytes_fetched_total": "Their bytes",
        "kvstore_peers_pages_fetch_failed_total": "Pages that another member had and did not send",
        "kvstore_peers_copy_pages": "Pages in RAM that this member does not own",
        "kvstore_peers_copy_bytes": "Their bytes",
        "kvstore_peers_sweeping": "1 while this member rebalances",
        "kvstore_peers_sweep_pages_missing": "Pages that this member lacked at the start of the "
        "newest rebalancing",
        "kvstore_peers_sweep_pages_fetched": "Of them, pages that it fetched",
        "kvstore_peers_sweep_pages_full": "Of them, pages for which it had no room",
        "kvstore_peers_sweep_pages_failed": "Of them, pages that no member sent",
    },
    "Tenants": {
        "kvstore_tenant_ram_bytes": "RAM that a tenant uses",
        "kvstore_tenant_ram_quota_bytes": "Its quota of RAM; 0: none",
        "kvstore_tenant_disk_bytes": "Disk that a tenant uses",
        "kvstore_tenant_disk_quota_bytes": "Its quota of disk; 0: none",
        "kvstore_tenant_pin_pages": "Pinned pages of a tenant",
        "kvstore_tenant_held_bytes": "Bytes that a tenant's processes hold in shared memory",
        "kvstore_tenant_refused_total": "Requests beyond a quota: puts, pins, holds, connections, "
        "requests or bytes",
    },
    "Namespaces": {
        "kvstore_namespace_pages": "Pages in RAM",
        "kvstore_lookup_pages_total": "Pages that lookups requested",
        "kvstore_lookup_prefix_hits_total": "Leading pages that lookups found",
        "kvstore_lookup_hits_total": "All pages that they found here",
        "kvstore_lookup_disk_hits_total": "Those on disk only",
        "kvstore_lookup_peer_hits_total": "Pages that they found at other members",
        "kvstore_lookup_misses_total": "Pages that lookups missed: absent, evicted, writing, "
        "removed, expired or corrupt",
        "kvstore_get_pages_total": "Pages sent to readers",
        "kvstore_get_bytes_total": "Their bytes",
        "kvstore_get_misses_total": "Pages that readers requested and the node lacked",
        "kvstore_put_pages_total": "Pages of puts: stored, exists, busy, full or aborted",
        "kvstore_put_bytes_total": "Bytes stored",
        "kvstore_evicted_pages_total": "Pages evicted from RAM",
    },
}
HELP = {name: text for section in SECTIONS.values() for name, text in section.items()}


class LimitHelp(NamedTuple):
    """The size of a limit, and what happens beyond it."""

    size: str
    beyond: str


# Resources of `make_limit`. One peer gets half unless the text says otherwise.
CAPS = {
    "bulk connections": LimitHelp("--sessions-max", "the longest idle one closes; else refused"),
    "shared-memory connections": LimitHelp(
        "--sessions-max", "the longest idle one closes; else refused"
    ),
    "gRPC calls": LimitHelp(
        "4 × --grpc-threads", "the oldest call without a request ends; else refused"
    ),
    "connections of a gateway": LimitHelp("8 × --grpc-threads + 256", "refused"),
    "gRPC transfers": LimitHelp("3/4 of --grpc-threads", "refused"),
    "gRPC durable puts": LimitHelp("3/8 of --grpc-threads", "refused"),
    "gRPC gets from disk": LimitHelp("9/16 of --grpc-threads", "refused"),
    "health calls": LimitHelp(f"{limits.HEALTH_CALLS_MAX}", "the oldest call ends"),
    "followers of views": LimitHelp(
        f"{limits.FOLLOWERS_MAX}", "refused; over gRPC the oldest call ends"
    ),
    "feeds": LimitHelp(f"{limits.FEEDS_MAX} over gRPC", "the oldest call ends"),
    "reflection streams": LimitHelp(f"{limits.REFLECTION_STREAMS_MAX}", "the oldest stream ends"),
    "bytes reserved by puts that are not committed": LimitHelp(
        "half of the RAM, a quarter for one peer", "refused before a page is evicted"
    ),
    "bytes held by reads in shared memory": LimitHelp("half of the RAM for one process", "refused"),
    "bytes of large requests": LimitHelp(
        f"{limits.REQUESTS_NBYTES_MAX // MIB} MiB", "refused before the request is received"
    ),
    "HTTP connections": LimitHelp(f"{limits.HTTP_CONNECTIONS_MAX}", "the oldest idle one closes"),
    "console watchers": LimitHelp(f"{limits.WATCHERS_MAX}", "refused"),
    "console calls": LimitHelp(f"{limits.CONSOLE_CALLS_MAX}", "refused"),
    "console reads": LimitHelp(f"{limits.CONSOLE_CALLS_MAX}", "refused"),
    **{f"{op} calls": LimitHelp(f"{count}", "refused") for op, count in limits.LONG_CALLS.items()},
}

# Limits of one request, call or connection.
BOUNDS = {
    "keys of a request": LimitHelp("--batch-keys-max", "INVALID_ARGUMENT"),
    "page bytes of a request": LimitHelp("--batch-bytes-max", "INVALID_ARGUMENT"),
    "byte ranges of a get": LimitHelp(f"{GET_RANGES_MAX:,}", "INVALID_ARGUMENT"),
    "keys × ranges of a get": LimitHelp(f"{GET_PIECES_MAX:,}", "INVALID_ARGUMENT"),
    "description of a namespace": LimitHelp(
        f"{limits.DESCRIPTION_NBYTES_MAX >> 10} KiB", "INVALID_ARGUMENT"
    ),
    "open namespaces": LimitHelp("--namespaces-max", "an empty one is forgotten; else refused"),
    "metadata of a gRPC call": LimitHelp("8 KiB", "refused"),
    "time for the first request of a connection": LimitHelp(
        f"{limits.REQUEST_S_MAX:g} s", "the connection closes"
    ),
    "time without 256 KiB of a transfer": LimitHelp("--stall-s", "the connection closes"),
    "rate of a whole transfer": LimitHelp(
        f"{limits.TRANSFER_NBYTES_PER_S_MIN // MIB} MiB/s after --stall-s", "the transfer ends"
    ),
    "time of a flush or a durable put": LimitHelp("--flush-s", "RESOURCE_EXHAUSTED"),
    "one scrub call": LimitHelp(
        f"{limits.SCRUB_NBYTES_MAX // MIB} MiB or {limits.SCRUB_S_MAX:g} s",
        "it returns a cursor to continue from",
    ),
    "a health watch": LimitHelp(f"{limits.HEALTH_WATCH_S_MAX:g} s", "the call ends"),
    "following views": LimitHelp(f"{limits.FOLLOW_S_MAX:g} s", "the client follows again"),
    "a feed": LimitHelp(f"{limits.FEED_S_MAX:g} s", "the client continues from its cursor"),
    "a reflection stream": LimitHelp(f"{limits.REFLECTION_S_MAX:g} s", "the stream ends"),
    "an HTTP request": LimitHelp(f"{limits.HTTP_REQUEST_S_MAX:g} s", "the connection closes"),
    "an HTTP reply": LimitHelp(f"{limits.HTTP_REPLY_S_MAX:g} s", "the connection closes"),
    "memory of a gateway": LimitHelp("--grpc-memory-bytes", "the gateway restarts"),
    "a silent gateway": LimitHelp("15 s", "the gateway restarts"),
    "log lines of one statement": LimitHelp("20 in 10 s", "counted, and logged with the next"),
}
