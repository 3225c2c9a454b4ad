"""Define nodes' replies.

Each message of a reply has a dataclass here with the same field names; `kvstore.messages.result`
converts. A field that an older node does not send has its default. Names that end in `_nbytes` are
bytes, in `_ms` milliseconds, and in `_unix_s` seconds since 1970. Counters count since the node's
start.
"""

import warnings
from dataclasses import astuple, dataclass, replace

from kvstore.keys import Namespace


class Reply:
    """Be false if all fields have their defaults, as in a part of a status that a node lacks."""

    def __bool__(self) -> bool:
        return self != type(self)()

    def HasField(self, name: str) -> bool:  # noqa: N802
        """Return whether a part of the status is there, as protobuf messages did."""
        instead = f"results are dataclasses: write `if status.{name}`"
        warnings.warn(instead, DeprecationWarning, stacklevel=2)
        return bool(getattr(self, name))


@dataclass(frozen=True)
class PageStat(Reply):
    """State of one page at a node.

    `age_ms`: since it came to RAM; 0 for a page on disk only. `idle_ms`: since its last use.
    `pin_ttl_ms`: 0 if it is not pinned. `holds`: reads in progress. `writing`: reserved, not
    visible yet. `ttl_ms`: time until it expires; 0 for never. `is_copy`: another member owns it;
    copies are evicted first and never written to disk.
    """

    prefix_hash: bytes = b""
    present: bool = False
    nbytes: int = 0
    checksum: bytes = b""
    age_ms: int = 0
    idle_ms: int = 0
    pin_ttl_ms: int = 0
    holds: int = 0
    writing: bool = False
    in_ram: bool = False
    on_disk: bool = False
    ttl_ms: int = 0
    is_copy: bool = False


@dataclass(frozen=True)
class Counters(Reply):
    """Requested pages and bytes, and the reasons of misses.

    `prefix_hits`: leading pages that lookups found; `pages_hit`: all pages that they found here, of
    which `pages_hit_disk` were on disk only. `pages_hit_peer`: found at other members.
    `miss_absent`: never stored, or removed too long ago to know the reason. `miss_writing`: not
    committed yet.
    """

    pages_asked: int = 0
    prefix_hits: int = 0
    pages_hit: int = 0
    miss_absent: int = 0
    miss_evicted: int = 0
    miss_writing: int = 0
    miss_removed: int = 0
    miss_corrupt: int = 0
    pages_put: int = 0
    pages_put_exists: int = 0
    pages_put_busy: int = 0
    pages_put_full: int = 0
    pages_put_aborted: int = 0
    pages_got: int = 0
    pages_get_missed: int = 0
    pages_evicted: int = 0
    nbytes_put: int = 0
    nbytes_got: int = 0
    miss_expired: int = 0
    pages_hit_disk: int = 0
    pages_hit_peer: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            *(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace and its pages. `page_count`: pages in RAM."""

    digest: bytes
    namespace: Namespace
    page_nbytes: int = 0
    page_count: int = 0
    counters: Counters = Counters()
    disk_page_count: int = 0

    def __add__(self, other: "NamespaceInfo") -> "NamespaceInfo":
        """Add the pages and counters that another node has of the same namespace."""
        return replace(
            self,
            page_count=self.page_count + other.page_count,
            disk_page_count=self.disk_page_count + other.disk_page_count,
            counters=self.counters + other.counters,
        )


@dataclass(frozen=True)
class Limits(Reply):
    """A node's limits of one request. `batch_nbytes_max`: page bytes of one put or get."""

    batch_keys_max: int = 0
    batch_nbytes_max: int = 0
    page_nbytes_max: int = 0
    message_nbytes_max: int = 0
    pin_ttl_ms_max: int = 0


@dataclass(frozen=True)
class SizeClass(Reply):
    """Slots of one size in RAM."""

    slot_nbytes: int = 0
    block_count: int = 0
    slot_count: int = 0
    used_count: int = 0


@dataclass(frozen=True)
class RamStatus(Reply):
    """The RAM tier.

    `used_nbytes`: slots in use. `page_count`: visible pages. `huge_nbytes`: bytes of the capacity
    that were in huge pages at the start.
    """

    capacity_nbytes: int = 0
    used_nbytes: int = 0
    extent_nbytes: int = 0
    extent_count: int = 0
    extent_free_count: int = 0
    page_count: int = 0
    writing_count: int = 0
    held_count: int = 0
    pinned_count: int = 0
    size_classes: tuple[SizeClass, ...] = ()
    huge_nbytes: int = 0


@dataclass(frozen=True)
class DiskStatus(Reply):
    """The disk tier.

    `state`: SERVING, or POISONED with the `reason`. `queue_nbytes`: bytes that wait to be written.
    `pages_corrupt`: damaged on disk and dropped. `pages_refused`: stayed in RAM only.
    `pages_read_in_part`: read for ranges of them, not into RAM. `usable_nbytes`: the part of the
    capacity for which its file system has space; `limit` says why it is less. `no_space_errors`:
    writes that found the file system full. `filesystem_nbytes` 0: not known.
    """

    state: str = ""
    reason: str = ""
    data_dir: str = ""
    capacity_nbytes: int = 0
    used_nbytes: int = 0
    page_count: int = 0
    queue_nbytes: int = 0
    queue_nbytes_max: int = 0
    direct_io: bool = False
    extent_count: int = 0
    extent_free_count: int = 0
    pages_written: int = 0
    pages_read: int = 0
    pages_evicted: int = 0
    pages_corrupt: int = 0
    pages_refused: int = 0
    pages_scrubbed: int = 0
    rows_damaged: int = 0
    nbytes_written: int = 0
    nbytes_read: int = 0
    pages_read_in_part: int = 0
    no_space_errors: int = 0
    usable_nbytes: int = 0
    limit: str = ""
    filesystem_free_nbytes: int = 0
    filesystem_nbytes: int = 0


@dataclass(frozen=True)
class ShmStatus(Reply):
    """The shared-memory wire.

    `orphan_count`: connections that ended while their process runs and may still write;
    `orphan_page_count`: pages that stay reserved or held for that reason.
    """

    socket: str = ""
    client_count: int = 0
    orphan_count: int = 0
    orphan_page_count: int = 0


@dataclass(frozen=True)
class LostMember(Reply):
    """A member that left without a drain.

    `address`: its last one. `since_unix_s`: 0 if not known yet. `share`: part of the keys that it
    owned first. `owners_left`: other owners that each of its keys has at least. `share_alone`:
    estimated part of all keys whose owners are lost members only.
    """

    id: str = ""
    address: str = ""
    since_unix_s: int = 0
    share: float = 0.0
    owners_left: int = 0
    share_alone: float = 0.0


@dataclass(frozen=True)
class PeersStatus(Reply):
    """State of a member: its view of the cluster, and the pages it replicates and fetches.

    `registry`: static, etcd, or why it does not answer. `queue_pages`: pages that wait to be sent
    to their owners. `pages_dropped`: pages that could not be sent. `copy_count`: pages in RAM that
    this member does not own. `apart`: members outside the view, and why. `sweep_...`: progress of
    the rebalance that runs (`sweeping`) or of the last one, which ended `sweep_age_ms` ago.
    `pages_under_replicated`: owned pages that it lacks, and copies that it could not send.
    """

    view_number: int = 0
    registry: str = ""
    queue_pages: int = 0
    queue_nbytes: int = 0
    queue_nbytes_max: int = 0
    pages_handed: int = 0
    pages_dropped: int = 0
    nbytes_handed: int = 0
    copy_count: int = 0
    copy_nbytes: int = 0
    pages_fetched: int = 0
    nbytes_fetched: int = 0
    pages_fetch_failed: int = 0
    apart: tuple[str, ...] = ()
    cluster: str = ""
    member_id: str = ""
    member_count: int = 0
    replicas: int = 0
    sweeping: bool = False
    sweep_pages_missing: int = 0
    sweep_pages_fetched: int = 0
    sweep_pages_full: int = 0
    sweep_pages_failed: int = 0
    sweep_age_ms: int = 0
    lost: tuple[LostMember, ...] = ()
    pages_under_replicated: int = 0


@dataclass(frozen=True)
class TenantUse(Reply):
    """A tenant's use, quotas (0 for none) and refused requests.

    `held_nbytes`: bytes held by reads in shared memory.
    """

    tenant: str = ""
    ram_nbytes: int = 0
    ram_quota_nbytes: int = 0
    disk_nbytes: int = 0
    disk_quota_nbytes: int = 0
    pin_count: int = 0
    pin_quota: int = 0
    held_nbytes: int = 0
    held_quota_nbytes: int = 0
    refused_puts: int = 0
    refused_pins: int = 0
    refused_holds: int = 0
    refused_connections: int = 0
    refused_requests: int = 0
    refused_bytes: int = 0


@dataclass(frozen=True)
class CertificateStatus(Reply):
    """The end of a certificate, and the `setting` that names its file."""

    setting: str = ""
    ends_unix_s: int = 0


@dataclass(frozen=True)
class TlsStatus(Reply):
    """The node's certificates.

    `client_certificates`: clients need one. `problem`: why the current files are not in use.
    """

    certificates: tuple[CertificateStatus, ...] = ()
    client_certificates: bool = False
    problem: str = ""


@dataclass(frozen=True)
class GatewayStatus(Reply):
    """A process that serves gRPC; a thread of the node if `nbytes_max`, its memory limit, is 0.

    `call_count`: calls in progress. `recent_ends`: how often it ended in the last minute.
    """

    name: str = ""
    pid: int = 0
    ready: bool = False
    rss_nbytes: int = 0
    nbytes_max: int = 0
    call_count: int = 0
    recent_ends: int = 0


@dataclass(frozen=True)
class GatewayEnd(Reply):
    """Number of ends of gateways for one reason: memory, hung, killed or failed."""

    why: str = ""
    count: int = 0


@dataclass(frozen=True)
class IdentitiesStatus(Reply):
    """The identities file in force; `digest` is its SHA-256.

    `problem_count`: lines that are skipped. `writable`: `push_identities` may replace it.
    """

    digest: bytes = b""
    identity_count: int = 0
    problem_count: int = 0
    writable: bool = False


@dataclass(frozen=True)
class OperationTimes(Reply):
    """Answered requests of one operation, counted by their time."""

    op: str = ""
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestTimes(Reply):
    """Times of requests on all wires.

    `bounds_ns`: the upper bounds of the counts in nanoseconds; the last count has none.
    """

    bounds_ns: tuple[int, ...] = ()
    operations: tuple[OperationTimes, ...] = ()


@dataclass(frozen=True)
class HintCount(Reply):
    """Pages that were named in hints with this action and this answer."""

    action: str = ""
    verdict: str = ""
    pages: int = 0


@dataclass(frozen=True)
class HintStatus(Reply):
    """Count what became of hints since the start, and what the node remembers for them.

    `retained_count`: pages in another eviction class than the normal one. `session_page_count`:
    pages that the known sessions own or share. `prefetching_count`: chains that wait.
    """

    counts: tuple[HintCount, ...] = ()
    retained_count: int = 0
    session_count: int = 0
    session_page_count: int = 0
    sessions_forgotten: int = 0
    prefetching_count: int = 0


@dataclass(frozen=True)
class NodeStatus(Reply):
    """A node's own status. Parts that it lacks or that the caller may not see are false.

    `state`: SERVING, DEGRADED (the disk tier failed) or DRAINING. `insecure`: what clients without
    identity may do; empty for nothing. `refused_calls`: without identity, role or tenant.
    """

    version: str = ""
    instance_id: bytes = b""
    state: str = ""
    uptime_ms: int = 0
    pid: int = 0
    rss_nbytes: int = 0
    session_count: int = 0
    ram: RamStatus = RamStatus()
    namespaces: tuple[NamespaceInfo, ...] = ()
    totals: Counters = Counters()
    limits: Limits = Limits()
    bulk_port: int = 0
    metrics_port: int = 0
    disk: DiskStatus = DiskStatus()
    shm: ShmStatus = ShmStatus()
    peers: PeersStatus = PeersStatus()
    tenants: tuple[TenantUse, ...] = ()
    insecure: str = ""
    refused_calls: int = 0
    tls: TlsStatus = TlsStatus()
    now_unix_ms: int = 0
    gateways: tuple[GatewayStatus, ...] = ()
    gateway_ends: tuple[GatewayEnd, ...] = ()
    identities: IdentitiesStatus = IdentitiesStatus()
    request_times: RequestTimes = RequestTimes()
    hints: HintStatus = HintStatus()


@dataclass(frozen=True)
class PushedIdentities(Reply):
    """An identities file's SHA-256, and the names of identities that it adds and removes."""

    digest: bytes = b""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForgetResult(Reply):
    """Numbers of things erased of a tenant.

    `left`: slots and rows that are still there, for the reasons in `why`. `plain_disk`: the disk is
    not encrypted, and bytes may stay on it until other pages overwrite them.
    """

    namespaces: int = 0
    pages: int = 0
    ram_nbytes: int = 0
    keys_destroyed: int = 0
    left: int = 0
    why: tuple[str, ...] = ()
    plain_disk: bool = False


@dataclass(frozen=True)
class ScrubResult(Reply):
    """Pages of one part of a disk. `next_cursor`: where the next part begins; empty at the end."""

    intact: int = 0
    damaged: int = 0
    nbytes: int = 0
    next_cursor: bytes = b""


@dataclass(frozen=True)
class DrainProgress(Reply):
    """Progress of a drain.

    `over`: no page is left, or no member accepts more. `pages_left`: pages that no owner has yet.
    """

    over: bool = False
    pages_left: int = 0
    pages_handed: int = 0


@dataclass(frozen=True)
class SweepResult(Reply):
    """Owned pages that a member lacks. `away`: members that did not answer it."""

    pages_missing: int = 0
    nbytes_missing: int = 0
    away: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event(Reply):
    """Event of a member at `unix_ms`, by the clock of the node that reports it.

    `kind`: started, joined, lost, ...: docs/cluster.md. `member`: empty for a node without a
    cluster.
    """

    unix_ms: int = 0
    kind: str = ""
    member: str = ""
    text: str = ""


@dataclass(frozen=True)
class Events(Reply):
    """Events that the node `member_id` saw, the oldest first. `kept`: they outlive its process."""

    events: tuple[Event, ...] = ()
    member_id: str = ""
    kept: bool = False


@dataclass(frozen=True)
class FeedModel(Reply):
    """The namespaces of one engine's KV; a block is stored when all of them have it.

    `id`: 16 bytes, equal in all nodes. From `blocks` on, of a single member's feed: which part of
    which KV its one namespace is.
    """

    id: bytes = b""
    tenant: str = ""
    model: str = ""
    revision: str = ""
    epoch: int = 0
    page_tokens: int = 0
    namespaces: tuple[bytes, ...] = ()
    blocks: bytes = b""
    group: int = 0
    groups: int = 0
    rank: int = 0
    ranks: int = 0


@dataclass(frozen=True)
class FeedEvent(Reply):
    """Event of the feed.

    `kind`: "reset": nothing that was told before holds, a snapshot begins; "stored" and "removed":
    blocks of a model; "ready": the snapshot is complete; "idle": nothing has changed for a while;
    "away": the node, or the member that `text` names, can not be reached, and what it told may be
    old. `sequence` rises with each change of one node; 0 in a snapshot, and in a cluster.
    """

    kind: str = ""
    model: FeedModel = FeedModel()
    prefix_hashes: tuple[bytes, ...] = ()
    sequence: int = 0
    text: str = ""


@dataclass(frozen=True)
class HostBlocks(Reply):
    """Leading blocks that the node at `host` has by itself, copies for near clients included.

    `ram`, `disk`: those of which it has all pages in RAM, on disk; a page may be in both.
    """

    host: str = ""
    blocks: int = 0
    ram: int = 0
    disk: int = 0


@dataclass(frozen=True)
class QueryResult(Reply):
    """Leading blocks of a prompt that are stored of one engine's KV, for clients on any host.

    `ram`, `disk`: as in HostBlocks. `hosts`: those that have some by themselves, the longest first.
    """

    model: FeedModel = FeedModel()
    blocks: int = 0
    ram: int = 0
    disk: int = 0
    hosts: tuple[HostBlocks, ...] = ()


@dataclass(frozen=True)
class RecordedUse(Reply):
    """Pages of one recorded request, by ids of this recording.

    `at_ms`: since its start. `stored`: used or stored without a lookup before. `page_tokens`:
    tokens of a page, divided by the ranks that share them. `session`: that a hint named, 0 for
    none; `ended`: by that hint.
    """

    at_ms: int = 0
    stored: bool = False
    page_nbytes: int = 0
    page_tokens: float = 0.0
    pages: tuple[int, ...] = ()
    session: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Recorded(Reply):
    """Requests recorded since the last call.

    `recording`: the recording's id for the next call. `more`: others wait. `dropped`: requests that
    exceeded the node's memory, since the start. `over`: it has ended.
    """

    recording: bytes = b""
    uses: tuple[RecordedUse, ...] = ()
    more: bool = False
    dropped: int = 0
    over: bool = False
