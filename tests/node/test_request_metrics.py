"""Metrics of requests: times, bytes and errors by operation, wire and tier."""

import sys
import threading

import pytest
from fleet import NUMBERS
from known_pages import Pages
from local_nodes import ClusterClient, Connect, ConnectRaw
from waiting import wait_until

from kvstore import InvalidRequest, KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node
from node.serving.http_server import HttpClient
from node.serving.metrics import metrics_text
from node.serving.request_metrics import BOUNDS_S, DISK, PEER, RAM, Histogram, RequestMetrics

WIRES = ["bulk", "shm", "grpc"]


def answered(node: Node, op: str, wire: str) -> int:
    histogram = node.service.traffic.requests().get((op, wire))
    return sum(histogram.counts) if histogram else 0


def gets(node: Node) -> dict[str, int]:
    return {tier: sum(histogram.counts) for tier, histogram in node.service.traffic.gets().items()}


def moved(node: Node, wire: str) -> tuple[int, int]:
    found = node.service.traffic.moved()
    return found.get((wire, "in"), 0), found.get((wire, "out"), 0)


def test_histogram_bucket_bounds_are_inclusive() -> None:
    histogram = Histogram()
    for ns in (0, 50_000, 50_001, 100_000, 10_000_000_000, 10_000_000_001):
        histogram.add(ns)
    assert [histogram.counts[0], histogram.counts[1]] == [2, 2]
    assert (histogram.counts[-2], histogram.counts[-1]) == (1, 1)
    assert sum(histogram.counts) == 6
    assert histogram.sum_ns == 20_000_200_002
    assert list(BOUNDS_S) == sorted(BOUNDS_S)


def test_wire_metrics_count_as_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire metrics repeat the histogram's code, to save time for each request."""
    now, traffic, wanted = [0], RequestMetrics(), Histogram()
    monkeypatch.setattr("node.serving.request_metrics.monotonic_ns", lambda: now[0])
    for ns in (0, 49_999, 50_000, 50_001, 250_000, 250_001, 7_000_000, 10_000_000_001):
        now[0] = 10**12 + ns
        traffic.of_wire("bulk").answered("get", 10**12)
        wanted.add(ns)
    found = traffic.requests()["get", "bulk"]
    assert (found.counts, found.sum_ns) == (wanted.counts, wanted.sum_ns)


def test_bytes_and_errors_add_up_with_zero_internal_errors() -> None:
    traffic = RequestMetrics()
    for nbytes in (3, 4):
        traffic.count_put("bulk", nbytes)
        traffic.of_wire("bulk").failed("get", InvalidRequest("no"))
    traffic.of_wire("bulk").answered("get", 0)
    assert traffic.moved() == {("bulk", "in"): 7}
    assert traffic.errors() == {
        ("get", "bulk", "invalid_argument"): 2,
        ("get", "bulk", "internal"): 0,
    }


def test_concurrent_threads_lose_no_count() -> None:
    """The switch interval is minimal, so that threads alternate as often as possible."""
    traffic, interval = RequestMetrics(), sys.getswitchinterval()
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        for _ in range(5000):
            traffic.of_wire("bulk").answered("lookup", 0)
            traffic.count_get(RAM, "bulk", 3, 0)

    threads = [threading.Thread(target=run) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(traffic.requests()["lookup", "bulk"].counts) == 20_000
    assert sum(traffic.gets()[RAM].counts) == 20_000
    assert traffic.moved() == {("bulk", "out"): 60_000}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("no"), "invalid_argument"),
        (KVStoreError("failed inside"), "internal"),
        (ConnectionAbortedError("left"), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (ValueError("no message"), "unknown"),
    ],
)
def test_unanswered_call_counts_a_code_without_a_time(error: BaseException, code: str) -> None:
    traffic = RequestMetrics()
    traffic.of_wire("bulk").failed("get", error)
    assert traffic.errors() == {("get", "bulk", code): 1}
    assert traffic.requests() == {}


@pytest.mark.parametrize("wire", WIRES)
def test_requests_are_timed_and_bytes_counted_on_each_wire(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client, keys = connect(node, wire), pages.keys(*range(4))
    before = {op: answered(node, op, wire) for op in ("lookup", "put", "commit", "get")}
    taken, given = moved(node, wire)
    others = {other: moved(node, other) for other in WIRES if other != wire}
    from_ram = gets(node)[RAM]
    pages.put(client, keys)
    assert client.lookup(pages.namespace, keys).prefix_pages == 4
    assert pages.get(client, [*keys, *pages.keys(7)]) == [True] * 4 + [False]

    def all_counted() -> bool:  # counted after the answer is sent
        more = {op: answered(node, op, wire) - count for op, count in before.items()}
        return more == {"lookup": 1, "put": 1, "commit": wire == "shm", "get": 1}

    wait_until(all_counted)
    assert moved(node, wire) == (taken + 4 * pages.nbytes, given + 4 * pages.nbytes)
    assert {other: moved(node, other) for other in others} == others
    assert gets(node)[RAM] == from_ram + 1


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_refused_request_counts_as_an_error_without_a_time(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client = connect(node, wire)
    client.open(pages.namespace)
    link = client._fan_out.nodes.only
    before = answered(node, "lookup", wire)
    errors = node.service.traffic.errors().get(("lookup", wire, "invalid_argument"), 0)
    request = pb.LookupRequest(namespace=pages.namespace.digest, prefix_hashes=[b"short"])
    with pytest.raises(InvalidRequest):
        link.run(
            lambda way, limit: way.wire.call("lookup", request, limit), None, client._deadline(None)
        )
    wait_until(
        lambda: (
            node.service.traffic.errors().get(("lookup", wire, "invalid_argument"), 0) == errors + 1
        )
    )
    assert answered(node, "lookup", wire) == before


def test_put_with_a_closed_connection_counts_as_cancelled(
    node: Node, connect: Connect, pages: Pages, raw: ConnectRaw
) -> None:
    connect(node).open(pages.namespace)
    connection = raw(node)
    before = node.service.traffic.errors().get(("put", "bulk", "cancelled"), 0)
    put = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=pages.keys(1), page_nbytes=pages.nbytes
    )
    assert list(connection.ask(put=put).put.verdicts) == [pb.WRITE]
    connection.sock.close()
    wait_until(
        lambda: node.service.traffic.errors().get(("put", "bulk", "cancelled"), 0) == before + 1
    )


def test_gets_from_other_members_are_counted_separately(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    client = near(cluster)
    for tier in (PEER, RAM):  # the second get finds near copies
        before = gets(cluster[0])
        pages.get(client, keys)
        assert gets(cluster[0]) == {**before, tier: before[tier] + 1}
    assert cluster[0].service.traffic.waiting_gets() == {DISK: 0, PEER: 0}


def test_failing_member_is_reported(cluster: list[Node]) -> None:
    links = cluster[0].peers.channels
    assert set(links.failing()) == {"n1", "n2"}
    assert not any(links.failing().values())
    links.channel("n1")._breaker.failure(KVStoreError("away"))
    assert links.failing() == {"n1": True, "n2": False}
    assert 'kvstore_peers_failing{member="n1"} 1.0' in scraped(cluster[0])
    assert 'kvstore_peers_failing{member="n2"} 0.0' in scraped(cluster[0])


def scraped(node: Node) -> str:
    return metrics_text(node.service)({}, HttpClient("127.0.0.1", ())).body().decode()
