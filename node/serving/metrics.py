"""Export Prometheus metrics from the node's own counters at every scrape."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from kvstore.cluster.view import REGISTRIES
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.serving.http_server import Asker
from node.serving.metrics_server import Answer, Choose
from node.serving.request_metrics import BOUNDS_S, Histogram
from node.serving.service import Service

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_MISSES = ("absent", "evicted", "writing", "removed", "expired", "corrupt")
_PUTS = {
    "stored": "pages_put",
    "exists": "pages_put_exists",
    "busy": "pages_put_busy",
    "full": "pages_put_full",
    "aborted": "pages_put_aborted",
}
_PLAIN = {
    "lookup_pages": ("pages_asked", "Pages asked for by lookups"),
    "lookup_prefix_hits": ("prefix_hits", "Leading pages found by lookups"),
    "get_pages": ("pages_got", "Pages sent to readers"),
    "get_misses": ("pages_get_missed", "Pages that readers asked for and were not there"),
    "evicted_pages": ("pages_evicted", "Pages evicted for want of space"),
    "put_bytes": ("nbytes_put", "Page bytes stored"),
    "get_bytes": ("nbytes_got", "Page bytes sent"),
}
_DISK_GAUGES = ("capacity_nbytes", "used_nbytes", "page_count", "queue_nbytes", "queue_nbytes_max")
_DISK_COUNTERS = (
    "pages_written",
    "pages_read",
    "pages_read_in_part",
    "pages_evicted",
    "pages_corrupt",
    "pages_refused",
    "pages_scrubbed",
    "nbytes_written",
    "nbytes_read",
)
_PEERS_GAUGES = (
    "view_number",
    "replicas",
    "queue_pages",
    "queue_nbytes",
    "queue_nbytes_max",
    "copy_count",
    "copy_nbytes",
    "sweeping",
    "sweep_pages_missing",
    "sweep_pages_fetched",
    "sweep_pages_full",
    "sweep_pages_failed",
)
_PEERS_COUNTERS = (
    "pages_handed",
    "nbytes_handed",
    "pages_dropped",
    "pages_fetched",
    "nbytes_fetched",
    "pages_fetch_failed",
)
_TENANT_GAUGES = {
    "ram_nbytes": "RAM that a tenant keeps from others",
    "ram_quota_nbytes": "Its quota of the RAM; 0: none",
    "disk_nbytes": "Disk that a tenant keeps from others",
    "disk_quota_nbytes": "Its quota of the disk; 0: none",
    "pin_count": "Pinned pages of a tenant",
    "held_nbytes": "Bytes that a tenant holds in shared memory",
}
_TENANT_REFUSED = ("puts", "pins", "holds", "connections", "requests", "bytes")
_RAM = (
    "capacity_nbytes",
    "used_nbytes",
    "extent_free_count",
    "page_count",
    "writing_count",
    "held_count",
    "pinned_count",
    "huge_nbytes",
)


class NodeCollector:
    """Turns NodeStatus into metric families; labels are namespace digest and model."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service = service
        self._caller = caller

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status: pb.NodeStatusReply = self._service.call(
            "node_status", pb.NodeStatusRequest(), self._caller
        )
        yield GaugeMetricFamily(
            "kvstore_serving", "1 while the node takes new pages", status.state != "DRAINING"
        )
        if status.HasField("ram"):  # who asks is told of the node itself
            yield from self._of_node(status)
        yield from self._of_tenants(status)
        yield from self._of_namespaces(status)

    def _of_gateways(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        ready = sum(gateway.ready for gateway in status.gateways)
        yield GaugeMetricFamily("kvstore_gateways_ready", "Gateways that serve gRPC", ready)
        memory = GaugeMetricFamily(
            "kvstore_gateway_resident_bytes", "Memory of a gateway process", labels=["gateway"]
        )
        for gateway in status.gateways:
            memory.add_metric([gateway.name], gateway.rss_nbytes)
        yield memory
        ends = CounterMetricFamily(
            "kvstore_gateway_ends", "Gateways that ended, and were started anew", labels=["why"]
        )
        for end in status.gateway_ends:
            ends.add_metric([end.why], end.count)
        yield ends

    def _of_node(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvstore_sessions", "Bulk connections and gRPC transfers", status.session_count
        )
        yield GaugeMetricFamily(
            "kvstore_private_bytes", "Resident bytes outside the arena", status.rss_nbytes
        )
        yield GaugeMetricFamily(
            "kvstore_insecure",
            "1: strangers may read or do what they should not",
            bool(status.insecure),
        )
        text = "Calls of who is not known, or has not the role or tenant"
        yield CounterMetricFamily("kvstore_refused_calls", text, status.refused_calls)
        for name in _RAM:
            yield GaugeMetricFamily(
                f"kvstore_ram_{_label(name)}", f"RAM tier: {name}", getattr(status.ram, name)
            )
        yield from self._of_gateways(status)
        if status.HasField("disk"):
            yield from self._of_disk(status.disk)
        if status.HasField("peers"):
            yield from self._of_peers(status.peers)
        if status.HasField("shm"):
            yield GaugeMetricFamily(
                "kvstore_shm_clients", "Shared-memory connections", status.shm.client_count
            )
            text = "Pages kept because the process that left them may still write"
            yield GaugeMetricFamily("kvstore_shm_orphan_pages", text, status.shm.orphan_page_count)
        yield from self._of_tls(status)
        yield from self._of_requests()

    def _of_disk(self, disk: pb.DiskStatus) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvstore_disk_serving", "0 while the disk tier is stopped", disk.state == "SERVING"
        )
        for name in _DISK_GAUGES:
            yield GaugeMetricFamily(
                f"kvstore_disk_{_label(name)}", f"Disk tier: {name}", getattr(disk, name)
            )
        for name in _DISK_COUNTERS:
            yield CounterMetricFamily(
                f"kvstore_disk_{_label(name)}", f"Disk tier: {name}", getattr(disk, name)
            )

    def _of_peers(self, peers: pb.PeersStatus) -> Iterator[Metric]:
        well = peers.registry in REGISTRIES
        yield GaugeMetricFamily(
            "kvstore_peers_registry_serving", "0 while etcd can not be asked", well
        )
        for name in _PEERS_GAUGES:
            yield GaugeMetricFamily(
                f"kvstore_peers_{_label(name)}", f"Other members: {name}", getattr(peers, name)
            )
        for name in _PEERS_COUNTERS:
            yield CounterMetricFamily(
                f"kvstore_peers_{_label(name)}", f"Other members: {name}", getattr(peers, name)
            )

        text = "1: calls to this member fail, and are tried now and then only"
        failing = GaugeMetricFamily("kvstore_peers_failing", text, labels=["member"])
        for member, fails in self._service.peers.links.failing().items():
            failing.add_metric([member], fails)
        yield failing

    def _of_requests(self) -> Iterator[Metric]:
        """Yield metrics of requests by transport, and of those that wait."""
        traffic = self._service.traffic
        text = (
            "Time from the whole request to the end of its answer, of requests that were answered"
        )
        yield _histogram("kvstore_request_seconds", text, ["op", "wire"], traffic.requests())
        text = (
            "Time until the pages of a get are in RAM, by the farthest place where one of them was"
        )
        gets = {(tier,): histogram for tier, histogram in traffic.gets().items()}
        yield _histogram("kvstore_get_seconds", text, ["tier"], gets)
        text = (
            "Requests that were not answered, by the code that the client was told; cancelled: "
            "it left or stalled"
        )
        errors = CounterMetricFamily("kvstore_request_errors", text, labels=["op", "wire", "code"])
        for values, count in traffic.errors().items():
            errors.add_metric(values, count)
        yield errors
        text = "Page bytes that clients wrote (in) or were given to read (out)"
        moved = CounterMetricFamily("kvstore_wire_bytes", text, labels=["wire", "direction"])
        for way, nbytes in traffic.moved().items():
            moved.add_metric(way, nbytes)
        yield moved
        waiting = GaugeMetricFamily(
            "kvstore_gets_waiting", "Gets that wait now, by where their pages are", labels=["tier"]
        )
        for tier, count in traffic.waiting_gets().items():
            waiting.add_metric([tier], count)
        yield waiting
        text = "Calls that wait for another call of the same peer"
        yield GaugeMetricFamily(
            "kvstore_calls_waiting", text, self._service.peer_queue.waiting_count
        )

    def _of_tls(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvstore_tls", "1 if the node's TCP ports speak TLS", status.HasField("tls")
        )
        text = "Unix time at which a certificate's time is up, by the setting that names its file"
        expiry = GaugeMetricFamily("kvstore_certificate_expiry_seconds", text, labels=["setting"])
        for certificate in status.tls.certificates:
            expiry.add_metric([certificate.setting], certificate.ends_unix_s)
        yield expiry

    def _of_tenants(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        for name, text in _TENANT_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvstore_tenant_{_label(name)}", text, labels=["tenant"])
            for use in status.tenants:
                gauge.add_metric([use.tenant], getattr(use, name))
            yield gauge
        refused = CounterMetricFamily(
            "kvstore_tenant_refused", "Refused for a quota", labels=["tenant", "what"]
        )
        for use in status.tenants:
            for what in _TENANT_REFUSED:
                refused.add_metric([use.tenant, what], getattr(use, f"refused_{what}"))
        yield refused

    def _of_namespaces(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        labels = ["namespace", "model"]
        infos = [((info.digest.hex(), info.namespace.model), info) for info in status.namespaces]
        pages = GaugeMetricFamily("kvstore_namespace_pages", "Pages of a namespace", labels=labels)
        for values, info in infos:
            pages.add_metric(values, info.page_count)
        yield pages
        for name, (field, text) in _PLAIN.items():
            yield _counter(f"kvstore_{name}", text, infos, {(): field})
        misses = {(reason,): f"miss_{reason}" for reason in _MISSES}
        yield _counter(
            "kvstore_lookup_misses",
            "Pages that lookups missed, by reason",
            infos,
            misses,
            ["reason"],
        )
        puts = {(outcome,): field for outcome, field in _PUTS.items()}
        yield _counter("kvstore_put_pages", "Pages of puts, by outcome", infos, puts, ["outcome"])


def _label(name: str) -> str:
    """Convert a field name to Prometheus' style: page_count is pages, held_count held_pages."""
    if name.endswith("_count"):
        stem = name.removesuffix("_count")
        name = f"{stem}s" if stem in ("page", "extent", "extent_free") else f"{stem}_pages"
    return name.replace("nbytes", "bytes").replace("extent_frees", "free_extents")


def _counter(
    name: str,
    text: str,
    infos: list[tuple[tuple[str, str], pb.NamespaceInfo]],
    fields: Mapping[Any, str],
    more_labels: list[str] | None = None,
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["namespace", "model", *(more_labels or [])])
    for values, info in infos:
        for extra, field in fields.items():
            family.add_metric([*values, *extra], getattr(info.counters, field))
    return family


def _histogram(
    name: str, text: str, labels: list[str], histograms: Mapping[Any, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for values, histogram in histograms.items():
        buckets = zip(bounds, accumulate(histogram.counts), strict=True)
        family.add_metric(values, list(buckets), histogram.sum_ns / 1e9)
    return family


def metrics_text(service: Service) -> Choose:
    """Return a function that chooses, by caller, the content type and the text of the metrics."""

    def choose(headers: Mapping[str, str], asker: Asker) -> Answer:
        gate, authorization = service.authorizer, headers.get("authorization", "")
        who = gate.authenticate(
            "metrics", asker.peer, lambda: gate.access.of_headers(authorization, asker.names)
        )
        caller = Caller(asker.peer, who=lambda: who)
        gate.admit("metrics", None, caller)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(service, caller))
        accept = headers.get("accept", "")
        # One of two: a version or an escaping that a scraper names would come back in the content
        # type.
        encode, content_type = choose_encoder(
            OPENMETRICS if OPENMETRICS.split(";")[0] in accept.lower() else ""
        )
        return Answer(content_type, who.scope, lambda: encode(registry))

    return choose
