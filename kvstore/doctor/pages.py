"""Put pages, read them back, compare and remove them; and explain why nothing hits.

`Pages` puts one page by each transport of each node, and one on its disk. All runs use the same
namespace and random keys. Each page has a time to live, in case even the removal fails.

`hints` compares namespaces and their counters, and explains misses in plain words. It has no I/O.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace

from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.cluster.view import View
from kvstore.config import ClientConfig, light_wire
from kvstore.doctor.checks import Finding, fail, ok, remedy_of, skipped, warn
from kvstore.doctor.connectivity import NAMES, Wires
from kvstore.errors import (
    ConfigError,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    Unavailable,
)
from kvstore.keys import Namespace
from kvstore.layout import PageLayout, opaque_layout
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import Counters, Keep, NamespaceInfo, NodeStatus, PutOutcome
from kvstore.security.identities import ALL, Role
from kvstore.security.secrets import tenant_of
from kvstore.tools.trace import page_content

MODEL = "kvstore-doctor"
PAGE_NBYTES = 16 << 10  # bytes; in a full node it displaces some sixteen pages for a moment
TTL_S = 60.0  # time to live of pages that could not be removed
TRIES = 2  # a full node may evict a page at once, and another doctor may remove the namespace
KEYS_TRIED = 256  # random keys tried until a member owns one
UNDER_WAY_S = 2.0  # seconds that a removal waits for interrupted puts
EMPTY_S, STEP_S = 1.0, 0.1  # until a removal is counted in both tiers

_REFUSED = {
    PutOutcome.BUSY: "another writer is storing it",
    PutOutcome.FULL: "no space: all pages are pinned, held or being written",
    PutOutcome.AWAY: "no owner of the page could be reached",
}

DIFFERENCES_SHOWN = 4

_CAUSES = {
    "miss_absent": "the requested pages were never stored here: does a writer save, "
    "and does it hash the same tokens?",
    "miss_evicted": "the pages were evicted before they were requested again: give "
    "the node more RAM",
    "miss_writing": "the pages were still being written when they were requested",
    "miss_removed": "the pages had been removed by a caller",
    "miss_expired": "the pages had expired: put them with a longer time to live (Keep, --ttl)",
    "miss_corrupt": "the pages did not match their checksum and were dropped: check this machine's "
    "memory",
}


class Pages:
    """Test pages of one examination; `hello` is a node's reply.

    Thread-safe except `clean`.
    """

    def __init__(self, config: ClientConfig, hello: pb.HelloReply, view: View | None) -> None:
        self._config = replace(config, page_key="", page_key_file="")
        tenant = tenant_of(config) if hello.tenant in ("", ALL) else hello.tenant
        self.namespace = Namespace(MODEL, opaque_layout(PAGE_NBYTES), tenant)
        self._role = hello.role
        self._view = view
        self._keys: list[bytes] = []  # keys of pages that were put, or may have been
        self._wake = threading.Condition()
        self._busy = 0  # running puts and gets
        self._over = False  # no put may begin any more

    @property
    def why_not(self) -> Finding | None:
        """Return why this client may not put pages; None if it may."""
        if self._role == Role.READ.name.lower():
            return skipped(
                "round trip",
                "the role read may not put pages",
                "run it with a token of role write or admin",
            )
        return None

    # ---- there and back ------------------------------------------------------------------

    def of_client(self) -> Iterator[Finding]:
        """Put and get a page as an engine's client does."""
        with Client(self._config) as client:
            found = self._trip("as a client", client, self._key(""))
            yield found._replace(found=f"{found.found}, wire {client.wire_name}")

    def of_node(self, wires: Wires, member: str = "") -> Iterator[Finding]:
        """Put and get a page by each working transport of a node, then through its disk.

        `member`: the node's id in the view.
        """
        for name in NAMES:
            if name in wires.clients:
                yield self._trip(name, wires.clients[name], self._key(member))
        status, best = (
            wires.node.status,
            next((name for name in NAMES if name in wires.clients), ""),
        )
        if not best:
            return
        if status is not None and status.ram and status.disk.state != "SERVING":
            why = "it is stopped" if status.disk else "this node has none"
            yield skipped("disk", why)
            return
        yield self._durable(wires.clients[best], self._key(member))

    def _trip(self, name: str, client: Client, key: bytes) -> Finding:
        content, buffer = self._content(key), bytearray(PAGE_NBYTES)
        try:
            for _ in range(TRIES):
                with self._under_way():
                    began = time.monotonic()
                    outcome = client.put(self.namespace, [key], [content], Keep(TTL_S))[0]
                    stored = time.monotonic()
                    hit = client.get(self.namespace, [key], [buffer])[0]
                if not outcome.kept:
                    return fail(
                        name,
                        _REFUSED[outcome],
                        "kvstore status shows pins and held pages: give the node more RAM",
                    )
                if hit or client.stats.corrupt_pages:
                    break
        except Forbidden as error:
            return skipped(name, str(error), remedy_of(error))
        except KVStoreError as error:
            return fail(name, str(error), _remedy(error))
        got = time.monotonic()
        if client.stats.corrupt_pages or (hit and buffer != content):
            return _corrupt(name, "a page came back with other bytes than were put")
        if not hit:
            return fail(
                name,
                "a page that was put is not found",
                "the node evicts it at once: is it full? kvstore status",
            )
        times = f"put {1000 * (stored - began):.1f} ms, get {1000 * (got - stored):.1f} ms"
        return ok(name, f"{PAGE_NBYTES >> 10} KiB came back equal: {times}")

    def _durable(self, client: Client, key: bytes) -> Finding:
        """Put a durable page and make the node verify its copies in RAM and on disk."""
        try:
            with self._under_way():
                began = time.monotonic()
                client.put(self.namespace, [key], [self._content(key)], Keep(TTL_S, durable=True))
                took_ms = 1000 * (time.monotonic() - began)
                there, checked = (
                    client.stat(self.namespace, [key])[0],
                    client.verify(self.namespace, [key]),
                )
        except (InvalidRequest, Forbidden) as error:
            return skipped("disk", str(error))
        except KVStoreError as error:
            remedy = (
                "the disk hangs, is slow or full: kvstore doctor --data-dir there, and the "
                "log of kvstore-node"
            )
            return fail("disk", str(error), remedy)
        if checked.dropped:
            return _corrupt("disk", "a page on disk does not match its checksum, and was dropped")
        if not there.on_disk or not checked.intact:
            return fail(
                "disk", "a durable page is not on disk", "the log of kvstore-node says more"
            )
        return ok("disk", f"a page was durable in {took_ms:.1f} ms, and its copy on disk is intact")

    def _content(self, key: bytes) -> bytes:
        return page_content(self.namespace.digest, key, PAGE_NBYTES)

    def _key(self, member: str) -> bytes:
        """Return a random key that this member owns, if one is found soon."""
        tried = [secrets.token_bytes(32) for _ in range(KEYS_TRIED if member else 1)]
        chosen = tried[0]
        if member and self._view is not None:
            owners = self._view.owners.owners(self.namespace.digest, tried)
            chosen = next(
                (key for key, of in zip(tried, owners, strict=True) if member in of[:1]), chosen
            )
        self._keys.append(chosen)
        return chosen

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Count a running put. Raises Unavailable during the clean-up."""
        with self._wake:
            if self._over:
                raise Unavailable("the examination is over")
            self._busy += 1
        try:
            yield
        finally:
            with self._wake:
                self._busy -= 1
                self._wake.notify_all()

    # ---- and gone ------------------------------------------------------------------------

    def clean(self) -> Iterator[Finding]:
        """Remove the test pages at all members, and the namespace if possible."""
        with self._wake:
            self._over = True
            self._wake.wait_for(lambda: not self._busy, UNDER_WAY_S)
            keys, self._keys = self._keys, []
        if not keys:
            return
        away: Away = {}
        try:
            wire = light_wire(self._config.address)
            with Client(
                replace(self._config, wire=wire, direct=False)
            ) as client:  # members replicate pages meanwhile
                client.remove(self.namespace, keys, away=away)
                named = self._named(client, keys, away)
        except KVStoreError as error:
            yield warn(
                "removed",
                f"not all could be: {error}",
                f"nothing: they go by themselves within {TTL_S:.0f} s",
            )
            return
        if away:
            remedy = f"nothing: what they have goes by itself within {TTL_S:.0f} s"
            yield warn("removed", f"not at {', '.join(sorted(away))}", remedy)
            return
        yield ok("removed", f"{len(keys)} pages{named}")

    def _named(self, client: Client, keys: list[bytes], away: Away) -> str:
        """Remove the test namespace if possible and report the result."""
        if self._role in ("", Role.ADMIN.name.lower()) and self._is_empty(client, keys, away):
            try:
                client.remove_namespace(self.namespace)
            except KVStoreError:
                if not away:  # every member was reached
                    raise
            return ", and the namespace"
        return "; its name stays until the node needs the slot"

    def _is_empty(self, client: Client, keys: list[bytes], away: Away) -> bool:
        """Return whether no member has a page, or sends one to another, within a second."""
        until = time.monotonic() + EMPTY_S
        while True:
            told = [
                status for status in client.statuses().values() if isinstance(status, NodeStatus)
            ]
            known = [
                info
                for status in told
                for info in status.namespaces
                if info.digest == self.namespace.digest
            ]
            stored = any(info.page_count or info.disk_page_count for info in known)
            sent = any(status.peers and status.peers.queue_pages for status in told)
            if not (stored or sent):
                return bool(known)
            if time.monotonic() >= until:
                return False
            if stored:  # another member sent them after they were removed
                client.remove(self.namespace, keys, away=away)
            time.sleep(STEP_S)


def _corrupt(name: str, said: str) -> Finding:
    remedy = (
        "take this node out of service: its memory, disk or network corrupts bytes; "
        "readers get misses"
    )
    return fail(name, said, remedy)


def _remedy(error: KVStoreError) -> str:
    if isinstance(error, Exhausted):
        return (
            "the error names the limit: docs/operations.md, Limits and Quotas; kvstore "
            "status shows the usage"
        )
    if isinstance(error, ConfigError):
        return "correct that setting"
    return remedy_of(
        error, "look at the log of kvstore-node, and at `kvstore top` while it happens"
    )


def page_count(info: NamespaceInfo) -> int:
    """Return a namespace's pages in RAM or on disk: most of those in RAM are on disk, too."""
    return max(info.page_count, info.disk_page_count)


def hints(known: Sequence[tuple[Namespace, NamespaceInfo]]) -> list[str]:
    """Return a line for each namespace that was asked for pages and never hit."""
    found = []
    for namespace, info in known:
        counters = info.counters
        if counters.pages_asked == 0 or counters.prefix_hits > 0:
            continue
        name = (
            f"{namespace.model} [{namespace.digest.hex()[:12]}]: 0 of {counters.pages_asked} "
            "pages asked hit"
        )
        found.append(f"{name}; {_nearest(namespace, known) or _cause(counters)}")
    return found


def _nearest(namespace: Namespace, known: Sequence[tuple[Namespace, NamespaceInfo]]) -> str:
    """Name the most similar namespace of the model that has pages, and how it differs."""
    siblings = [
        (len(differences(namespace, other)), other, info)
        for other, info in known
        if other.model == namespace.model and other.digest != namespace.digest and page_count(info)
    ]
    if not siblings:
        return ""
    _, other, info = min(siblings, key=lambda sibling: sibling[0])
    listed = differences(namespace, other)
    more = f" and {len(listed) - DIFFERENCES_SHOWN} more" if len(listed) > DIFFERENCES_SHOWN else ""
    return (
        f"[{other.digest.hex()[:12]}] of the same model holds {page_count(info)} pages but differs "
        f"in {', '.join(listed[:DIFFERENCES_SHOWN])}{more}"
    )


def _cause(counters: Counters) -> str:
    if counters.pages_hit:
        return (
            "later pages are stored, but not the first one of each request, so there is no prefix"
        )
    return max(_CAUSES.items(), key=lambda cause: getattr(counters, cause[0]))[1]


def differences(ours: Namespace, theirs: Namespace) -> list[str]:
    """List differing fields: ['tp_size (2, there 4)', 'layout.kv.k.dtype (...)', ...]."""
    found = _different_fields(
        {f.name: getattr(ours, f.name) for f in fields(ours) if f.name != "layout"},
        {f.name: getattr(theirs, f.name) for f in fields(theirs) if f.name != "layout"},
    )
    return found + _different_fields(_layout_fields(ours.layout), _layout_fields(theirs.layout))


def _different_fields(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    names = dict.fromkeys((*ours, *theirs))
    return [
        f"{name} ({_shown(ours, name)}, there {_shown(theirs, name)})"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _shown(values: dict[str, object], name: str) -> str:
    value = values.get(name, "none")
    return "empty" if value == "" else str(value)


def _layout_fields(layout: PageLayout) -> dict[str, object]:
    values: dict[str, object] = {"page_tokens": layout.page_tokens}
    for group in layout.groups:
        values[f"layout.{group.name}.layers"] = _layers(group.layers)
        for plane in group.planes:
            start = f"layout.{group.name}.{plane.name}"
            values[f"{start}.dtype"] = plane.dtype
            values[f"{start}.unit_shape"] = "x".join(str(n) for n in plane.unit_shape)
            values[f"{start}.unit_tokens"] = plane.unit_tokens
    return values


def _layers(layers: tuple[int, ...]) -> str:
    contiguous = layers == tuple(range(layers[0], layers[0] + len(layers)))
    return f"{layers[0]}..{layers[-1]}" if contiguous else ",".join(str(layer) for layer in layers)
