"""Export Prometheus metrics, made from the node's counters, and serve them over HTTP."""

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from kvstore.cluster.view import REGISTRIES
from kvstore.errors import Unavailable
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.hints.calls import hint_names
from node.serving.http_server import HttpClient, HttpServer, Request, Respond, Response, text
from node.serving.reference import HELP
from node.serving.request_metrics import BOUNDS_S, Histogram
from node.serving.service import Service
from node.tls import Certificates

_AGE_FACTOR = 10
_CACHED_MAX = 64
HEALTH_PATH = "/health"
CONSOLE_PATH = "/console"
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
    "lookup_pages": "pages_asked",
    "lookup_prefix_hits": "prefix_hits",
    "lookup_hits": "pages_hit",
    "lookup_disk_hits": "pages_hit_disk",
    "lookup_peer_hits": "pages_hit_peer",
    "get_pages": "pages_got",
    "get_misses": "pages_get_missed",
    "evicted_pages": "pages_evicted",
    "put_bytes": "nbytes_put",
    "get_bytes": "nbytes_got",
}
_DISK_GAUGES = (
    "capacity_nbytes",
    "usable_nbytes",
    "used_nbytes",
    "page_count",
    "queue_nbytes",
    "queue_nbytes_max",
    "filesystem_free_nbytes",
    "filesystem_nbytes",
)
_DISK_COUNTERS = (
    "pages_written",
    "pages_read",
    "pages_read_in_part",
    "pages_evicted",
    "pages_corrupt",
    "pages_refused",
    "pages_scrubbed",
    "no_space_errors",
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
_TENANT_GAUGES = (
    "ram_nbytes",
    "ram_quota_nbytes",
    "disk_nbytes",
    "disk_quota_nbytes",
    "pin_count",
    "held_nbytes",
)
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


class Answer(NamedTuple):
    """A text of metrics.

    All clients of one `scope` get the same.
    """

    content_type: str
    scope: Hashable
    body: Callable[[], bytes]


# Takes the headers of a request and its sender. It and the body raise KVStoreError.
Choose = Callable[[Mapping[str, str], HttpClient], Answer]


class NodeCollector:
    """Turns NodeStatus into metric families; labels are namespace digest and model."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service = service
        self._caller = caller

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, each with its text of `reference`."""
        for metric in self._families():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            metric.documentation = HELP[name]
            yield metric

    def _families(self) -> Iterator[Metric]:
        status: pb.NodeStatusReply = self._service.call(
            "node_status", pb.NodeStatusRequest(), self._caller
        )
        yield GaugeMetricFamily("kvstore_serving", "", status.state != "DRAINING")
        if status.HasField("ram"):  # tenants do not see the node itself
            yield from self._of_node(status)
        yield from self._of_tenants(status)
        yield from self._of_namespaces(status)

    def _of_gateways(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        ready = sum(gateway.ready for gateway in status.gateways)
        yield GaugeMetricFamily("kvstore_gateways_ready", "", ready)
        memory = GaugeMetricFamily("kvstore_gateway_resident_bytes", "", labels=["gateway"])
        for gateway in status.gateways:
            memory.add_metric([gateway.name], gateway.rss_nbytes)
        yield memory
        ends = CounterMetricFamily("kvstore_gateway_ends", "", labels=["why"])
        for end in status.gateway_ends:
            ends.add_metric([end.why], end.count)
        yield ends

    def _of_node(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvstore_sessions", "", status.session_count)
        yield GaugeMetricFamily("kvstore_private_bytes", "", status.rss_nbytes)
        yield GaugeMetricFamily(
            "kvstore_insecure",
            "",
            bool(status.insecure),
        )
        yield CounterMetricFamily("kvstore_refused_calls", "", status.refused_calls)
        for name in _RAM:
            yield GaugeMetricFamily(f"kvstore_ram_{_label(name)}", "", getattr(status.ram, name))
        yield from self._of_gateways(status)
        if status.HasField("disk"):
            yield from self._of_disk(status.disk)
        if status.HasField("peers"):
            yield from self._of_peers(status.peers)
        if status.HasField("shm"):
            yield GaugeMetricFamily("kvstore_shm_clients", "", status.shm.client_count)
            yield GaugeMetricFamily("kvstore_shm_orphan_pages", "", status.shm.orphan_page_count)
        yield from self._of_hints(status.hints)
        yield from self._of_tls(status)
        yield from self._of_requests()

    def _of_hints(self, hints: pb.HintStatus) -> Iterator[Metric]:
        pages = CounterMetricFamily("kvstore_hint_pages", "", labels=["action", "verdict"])
        told = {(count.action, count.verdict): count.pages for count in hints.counts}
        for labels in itertools.product(hint_names(pb.HintAction), hint_names(pb.HintVerdict)):
            pages.add_metric(labels, told.get(labels, 0))
        yield pages
        forgotten = hints.sessions_forgotten
        yield GaugeMetricFamily("kvstore_ram_retained_pages", "", hints.retained_count)
        yield GaugeMetricFamily("kvstore_hint_sessions", "", hints.session_count)
        yield CounterMetricFamily("kvstore_hint_sessions_forgotten", "", forgotten)
        yield GaugeMetricFamily("kvstore_prefetching_hints", "", hints.prefetching_count)

    def _of_disk(self, disk: pb.DiskStatus) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvstore_disk_serving", "", disk.state == "SERVING")
        for name in _DISK_GAUGES:
            yield GaugeMetricFamily(f"kvstore_disk_{_label(name)}", "", getattr(disk, name))
        for name in _DISK_COUNTERS:
            yield CounterMetricFamily(f"kvstore_disk_{_label(name)}", "", getattr(disk, name))

    def _of_peers(self, peers: pb.PeersStatus) -> Iterator[Metric]:
        well = peers.registry in REGISTRIES
        yield GaugeMetricFamily("kvstore_peers_registry_serving", "", well)
        for name in _PEERS_GAUGES:
            yield GaugeMetricFamily(f"kvstore_peers_{_label(name)}", "", getattr(peers, name))
        for name in _PEERS_COUNTERS:
            yield CounterMetricFamily(f"kvstore_peers_{_label(name)}", "", getattr(peers, name))

        yield GaugeMetricFamily("kvstore_peers_lost", "", len(peers.lost))
        thin = peers.pages_under_replicated
        yield GaugeMetricFamily("kvstore_pages_under_replicated", "", thin)
        failing = GaugeMetricFamily("kvstore_peers_failing", "", labels=["member"])
        for member, fails in self._service.peers.channels.failing().items():
            failing.add_metric([member], fails)
        yield failing

    def _of_requests(self) -> Iterator[Metric]:
        """Yield metrics of requests by transport, and of those that wait."""
        traffic = self._service.traffic
        yield _histogram("kvstore_request_seconds", ["op", "wire"], traffic.requests())
        gets = {(tier,): histogram for tier, histogram in traffic.gets().items()}
        yield _histogram("kvstore_get_seconds", ["tier"], gets)
        errors = CounterMetricFamily("kvstore_request_errors", "", labels=["op", "wire", "code"])
        for values, count in traffic.errors().items():
            errors.add_metric(values, count)
        yield errors
        moved = CounterMetricFamily("kvstore_wire_bytes", "", labels=["wire", "direction"])
        for way, nbytes in traffic.moved().items():
            moved.add_metric(way, nbytes)
        yield moved
        waiting = GaugeMetricFamily("kvstore_gets_waiting", "", labels=["tier"])
        for tier, count in traffic.waiting_gets().items():
            waiting.add_metric([tier], count)
        yield waiting
        yield GaugeMetricFamily("kvstore_calls_waiting", "", self._service.peer_queue.waiting_count)

    def _of_tls(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvstore_tls", "", status.HasField("tls"))
        expiry = GaugeMetricFamily("kvstore_certificate_expiry_seconds", "", labels=["setting"])
        for certificate in status.tls.certificates:
            expiry.add_metric([certificate.setting], certificate.ends_unix_s)
        yield expiry

    def _of_tenants(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        for name in _TENANT_GAUGES:
            gauge = GaugeMetricFamily(f"kvstore_tenant_{_label(name)}", "", labels=["tenant"])
            for use in status.tenants:
                gauge.add_metric([use.tenant], getattr(use, name))
            yield gauge
        refused = CounterMetricFamily("kvstore_tenant_refused", "", labels=["tenant", "what"])
        for use in status.tenants:
            for what in _TENANT_REFUSED:
                refused.add_metric([use.tenant, what], getattr(use, f"refused_{what}"))
        yield refused

    def _of_namespaces(self, status: pb.NodeStatusReply) -> Iterator[Metric]:
        labels = ["namespace", "model"]
        infos = [((info.digest.hex(), info.namespace.model), info) for info in status.namespaces]
        pages = GaugeMetricFamily("kvstore_namespace_pages", "", labels=labels)
        for values, info in infos:
            pages.add_metric(values, info.page_count)
        yield pages
        for name, field in _PLAIN.items():
            yield _counter(f"kvstore_{name}", infos, {(): field})
        misses = {(reason,): f"miss_{reason}" for reason in _MISSES}
        yield _counter(
            "kvstore_lookup_misses",
            infos,
            misses,
            ["reason"],
        )
        puts = {(outcome,): field for outcome, field in _PUTS.items()}
        yield _counter("kvstore_put_pages", infos, puts, ["outcome"])


def _label(name: str) -> str:
    """Convert a field name to Prometheus' style: page_count is pages, held_count held_pages."""
    if name.endswith("_count"):
        stem = name.removesuffix("_count")
        name = f"{stem}s" if stem in ("page", "extent", "extent_free") else f"{stem}_pages"
    return name.replace("nbytes", "bytes").replace("extent_frees", "free_extents")


def _counter(
    name: str,
    infos: list[tuple[tuple[str, str], pb.NamespaceInfo]],
    fields: Mapping[Any, str],
    more_labels: list[str] | None = None,
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, "", labels=["namespace", "model", *(more_labels or [])])
    for values, info in infos:
        for extra, field in fields.items():
            family.add_metric([*values, *extra], getattr(info.counters, field))
    return family


def _histogram(
    name: str, labels: list[str], histograms: Mapping[Any, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, "", labels=labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for values, histogram in histograms.items():
        buckets = zip(bounds, itertools.accumulate(histogram.counts), strict=True)
        family.add_metric(values, list(buckets), histogram.sum_ns / 1e9)
    return family


def metrics_text(service: Service) -> Choose:
    """Return a function that chooses, by caller, the content type and the text of the metrics."""

    def choose(headers: Mapping[str, str], asker: HttpClient) -> Answer:
        gate, authorization = service.authorizer, headers.get("authorization", "")
        principal = gate.authenticate(
            "metrics", asker.peer, lambda: gate.access.of_headers(authorization, asker.names)
        )
        caller = Caller(asker.peer, principal=lambda: principal)
        gate.admit("metrics", None, caller)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(service, caller))
        accept = headers.get("accept", "")
        # One of two: a version or an escaping named by a scraper would be echoed in the content
        # type.
        encode, content_type = choose_encoder(
            OPENMETRICS if OPENMETRICS.split(";")[0] in accept.lower() else ""
        )
        return Answer(content_type, principal.scope, lambda: encode(registry))

    return choose


class MetricsServer(HttpServer):
    """The HTTP server of /metrics, /health and the console; it serves once constructed.

    Scrapes are answered from one text, made anew when it is older than ten times what making it
    took. So a node spends at most a tenth of a core on them, however often clients scrape. /health
    needs no token: a kubelet has none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        choose: Choose,
        serving: Callable[[], bool],
        certificates: Certificates | None = None,
        console: Respond | None = None,
        trusts_host: Callable[[str], bool] = lambda host: True,
    ) -> None:
        """Listen. `serving` decides what /health says; `console` is None for a node without one."""
        self._choose = choose
        self._serving = serving
        self._console = console
        self._making = threading.Lock()  # for one text at a time
        # By content type and scope: end of validity, and the reply.
        self._cached: dict[Hashable, tuple[float, Response]] = {}
        super().__init__(host, port, self._reply, certificates, trusts_host)

    def _reply(self, request: Request) -> Response | None:
        if self._console is not None and f"{request.path}/".startswith(f"{CONSOLE_PATH}/"):
            if request.connection.hurried:
                raise Unavailable("this node has no descriptor or no thread left for the console")
            return self._console(request)
        if request.method not in ("GET", "HEAD"):
            return text("GET or HEAD", 405)
        if request.path == HEALTH_PATH:
            return text("serving") if self._serving() else text("not serving", 503)
        if request.path == "/" and self._console is not None:
            return Response("text/plain", b"", 302, {"Location": f"{CONSOLE_PATH[1:]}/"})
        return self._text(self._choose(request.headers, request.client))

    def _text(self, answer: Answer) -> Response:
        key = (answer.content_type, answer.scope)
        with self._making:
            good_until, reply = self._cached.get(key, (0.0, None))
            began = time.monotonic()
            if reply is None or began >= good_until:
                reply = Response(answer.content_type, answer.body())
                now = time.monotonic()
                if len(self._cached) >= _CACHED_MAX:
                    self._cached.clear()
                self._cached[key] = (now + _AGE_FACTOR * (now - began), reply)
        return reply
