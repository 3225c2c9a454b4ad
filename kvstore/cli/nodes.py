"""Show a node, its tiers, its tenants and its namespaces, and why nothing hits."""

import time
from typing import Any

from kvstore.cli.access.tenants import show_tenants
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import copies_line, rebalance_line, replication_line
from kvstore.cli.output import (
    console,
    emit,
    human_ms,
    human_nbytes,
    note,
    percent,
    printable,
    show,
    show_fitting,
    status_json,
    told_all,
)
from kvstore.client import Client
from kvstore.doctor.pages import hints, page_count
from kvstore.keys import Namespace
from kvstore.messages import plain
from kvstore.results import DiskStatus, NamespaceInfo, NodeStatus, PeersStatus, ShmStatus
from kvstore.security.certificates import NEAR_END_S, date

MISS_REASONS = ("absent", "evicted", "writing", "removed", "expired", "corrupt")


def show_status(run: Invocation, client: Client) -> None:
    """Show one node's status."""
    reply = client.node_status()
    known = [(info.namespace, info) for info in reply.namespaces]
    found = hints(known)
    if run.as_json:
        namespaces = [namespace_json(namespace, info) for namespace, info in known]
        emit(
            {
                **status_json(reply),
                "address": client.config.address,
                "namespaces": namespaces,
                "hints": found,
            }
        )
        return
    _show_node(client.config.address, reply)
    if (
        any(use.ram_quota_nbytes or use.disk_quota_nbytes for use in reply.tenants)
        or len(reply.tenants) > 1
    ):
        show_tenants([reply])
        console().print()
    if known:
        show_namespaces(known)
    for hint in found:
        note(f"hint: {hint}")


def namespace_json(namespace: Namespace, info: NamespaceInfo) -> dict[str, Any]:
    """Return all that is known about a namespace as one flat object."""
    identity = plain(info.namespace)
    return {
        "digest": namespace.digest.hex(),
        **identity,
        "layout_fingerprint": namespace.layout.fingerprint.hex(),
        "page_tokens": namespace.layout.page_tokens,
        "page_nbytes": info.page_nbytes,
        "page_count": info.page_count,
        "disk_page_count": info.disk_page_count,
        "counters": plain(info.counters),
    }


def _show_node(address: str, reply: NodeStatus) -> None:
    limits = reply.limits
    whole = told_all(reply)
    lines = [f"node {reply.version} at {address}  {reply.state}  up {human_ms(reply.uptime_ms)}"]
    if whole:
        lines[0] += f"  pid {reply.pid}  rss {human_nbytes(reply.rss_nbytes)}"
    if reply.insecure:
        lines.append(f"INSECURE: {reply.insecure}")
    sessions = f"sessions {reply.session_count}  " if whole else ""
    lines.append(
        f"{sessions}bulk port {reply.bulk_port or 'none'}  "
        f"metrics port {reply.metrics_port or 'none'}"
    )
    if whole:
        lines += [*_tls_lines(reply), *_tier_lines(reply)]
    lines.append(
        f"limits {limits.batch_keys_max:,} keys, {human_nbytes(limits.batch_nbytes_max)} a batch, "
        f"{human_nbytes(limits.page_nbytes_max)} a page"
    )
    if not whole:
        lines.append("tiers, connections and members are shown to identities of all tenants only")
    out = console()
    for line in lines:
        out.print(printable(line), markup=False, soft_wrap=True)
    out.print()
    if reply.ram.size_classes:
        rows = [
            (human_nbytes(size.slot_nbytes), size.block_count, size.slot_count, size.used_count)
            for size in reply.ram.size_classes
        ]
        show((">SLOT", ">BLOCKS", ">SLOTS", ">USED"), rows)
        out.print()


def _shm_lines(shm: ShmStatus) -> list[str]:
    lines = [f"shared memory at {shm.socket}  connections {shm.client_count}"]
    if shm.orphan_count:
        lines.append(
            f"{shm.orphan_page_count:,} pages of {shm.orphan_count} lost connections are "
            "kept: their processes still run and may write to them"
        )
    return lines


def _gateway_line(reply: NodeStatus) -> str:
    ready = sum(gateway.ready for gateway in reply.gateways)
    most = max(gateway.rss_nbytes for gateway in reply.gateways)
    calls = sum(gateway.call_count for gateway in reply.gateways)
    ended = ", ".join(f"{end.count:,} {end.why}" for end in reply.gateway_ends if end.count)
    return (
        f"gRPC gateways {ready} of {len(reply.gateways)} ready  calls {calls}  memory "
        f"{human_nbytes(most)} at most{f'  ended: {ended}' if ended else ''}"
    )


def _tier_lines(reply: NodeStatus) -> list[str]:
    """Return the lines on shared memory, gateways, members, RAM and disk."""
    ram = reply.ram
    return [
        *(_shm_lines(reply.shm) if reply.shm else []),
        *([_gateway_line(reply)] if reply.gateways else []),
        *(_peers_lines(reply.peers) if reply.peers else []),
        f"RAM {human_nbytes(ram.used_nbytes)} of {human_nbytes(ram.capacity_nbytes)} "
        f"({percent(ram.used_nbytes, ram.capacity_nbytes)})  pages {ram.page_count:,}  "
        f"writing {ram.writing_count:,}  held {ram.held_count:,}  pinned {ram.pinned_count:,}"
        f"{'  in huge pages ' + human_nbytes(ram.huge_nbytes) if ram.huge_nbytes else ''}",
        f"extents {ram.extent_count - ram.extent_free_count} of {ram.extent_count} in use, "
        f"{human_nbytes(ram.extent_nbytes)} each",
        *(_disk_lines(reply.disk) if reply.disk else []),
    ]


def _tls_lines(reply: NodeStatus) -> list[str]:
    if not reply.bulk_port:  # host=none
        return ["TLS off: it serves by its Unix socket only"]
    if not reply.tls:
        return ["TLS off: anyone on the network path can read and change all traffic"]
    tls = reply.tls
    lines = [f"TLS on, with{'' if tls.client_certificates else 'out'} certificates of clients"]
    for one in tls.certificates:
        left_ms = 1000 * (one.ends_unix_s - time.time())
        lines[0] += f"  {one.setting} until {date(one.ends_unix_s)}"
        if left_ms < 1000 * NEAR_END_S:
            lines.append(
                f"{one.setting} "
                f"{'HAS EXPIRED' if left_ms <= 0 else 'expires in ' + human_ms(left_ms)}: renew it"
            )
    if tls.problem:
        lines.append(f"the current TLS files are not in use: {tls.problem}")
    return lines


def _peers_lines(peers: PeersStatus) -> list[str]:
    return [
        f"member {peers.member_id} of {peers.cluster}  view {peers.view_number}  members "
        f"{peers.member_count}  replicas {peers.replicas}  registry {peers.registry}",
        copies_line(peers),
        replication_line(peers),
        rebalance_line(peers),
    ]


def _disk_lines(disk: DiskStatus) -> list[str]:
    lines = [
        f"disk {human_nbytes(disk.used_nbytes)} of {human_nbytes(disk.capacity_nbytes)} "
        f"({percent(disk.used_nbytes, disk.capacity_nbytes)})  pages {disk.page_count:,}  "
        f"queue {human_nbytes(disk.queue_nbytes)} of {human_nbytes(disk.queue_nbytes_max)}  "
        f"in {disk.data_dir}{'' if disk.direct_io else ' (no O_DIRECT)'}",
        f"disk written {disk.pages_written:,}  read {disk.pages_read:,}, in part "
        f"{disk.pages_read_in_part:,}  evicted {disk.pages_evicted:,}  kept in RAM only "
        f"{disk.pages_refused:,}  damaged {disk.pages_corrupt:,}  verified {disk.pages_scrubbed:,}",
    ]
    if disk.limit:
        lines.append(f"DISK LIMITED: {disk.limit}; free space there, or lower --disk-bytes")
    if disk.state != "SERVING":
        lines.append(
            f"DISK STOPPED: {disk.reason}. RAM still serves; repair it, then: kvstore recover"
        )
    return lines


def show_namespaces(
    known: list[tuple[Namespace, NamespaceInfo]], count: int | None = None, copies: bool = False
) -> None:
    """Show the namespaces with most pages first, at most `count`.

    `copies` says that pages are counted once per member.
    """
    columns = (
        "NAMESPACE",
        "MODEL",
        *page_columns(copies),
        ">ASKED",
        ">HIT",
        *(f">{reason.upper()}" for reason in MISS_REASONS),
    )
    rows = []
    for namespace, info in sorted(known, key=lambda entry: -page_count(entry[1]))[:count]:
        counters = info.counters
        hit = percent(counters.prefix_hits, counters.pages_asked)
        misses = [getattr(counters, f"miss_{reason}") for reason in MISS_REASONS]
        rows.append(
            (
                namespace.digest.hex()[:12],
                namespace.model,
                info.page_count,
                info.disk_page_count,
                counters.pages_asked,
                hit,
                *misses,
            )
        )
    show_fitting(columns, rows)
    if len(rows) < len(known):
        console().print(f"and {len(known) - len(rows):,} more namespaces: kvstore ls", markup=False)


def page_columns(copies: bool) -> tuple[str, str]:
    """Return the page columns; with `copies`, a page counts at each member that has it."""
    return (">COPIES IN RAM", ">ON DISK") if copies else (">IN RAM", ">ON DISK")
