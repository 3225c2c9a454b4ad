"""Metrics, health and errors of a node with a disk, as docs/operations.md describes them under
"A disk that fails" and "What to watch".
"""

import re
import threading
import urllib.request

import grpc
import pytest
from disk_nodes import FaultyLayer, Nodes, Pages
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore import ClientConfig, PutOutcome
from kvstore.errors import Exhausted
from node.disk.io_process import QUESTION_S
from node.server import Node
from node.serving.http_server import HttpClient
from node.serving.metrics import metrics_text

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


def metrics(node: Node) -> dict[str, float]:
    """Return fresh metrics of the node, by name."""
    node.metrics._cached.clear()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{node.metrics.port}/metrics", timeout=60.0
    ) as reply:
        return {
            name: float(value)
            for name, value in re.findall(r"^(\w+) (\S+)$", reply.read().decode(), re.MULTILINE)
        }


def health(node: Node) -> tuple[int, int]:
    """Return the gRPC health status of the node and of its disk."""
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        names = ("", "kvstore.Disk")
        return tuple(
            check(health_pb2.HealthCheckRequest(service=name), timeout=60.0).status
            for name in names
        )


def test_metrics_and_health_show_a_stopped_and_recovered_disk(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2), durable=True)
    assert (metrics(node)["kvstore_disk_serving"], health(node)) == (1, (SERVING, SERVING))
    node.disk.stop_after_error("broken by the test")
    assert (metrics(node)["kvstore_disk_serving"], health(node)) == (0, (SERVING, NOT_SERVING))
    pages.put(client, pages.keys(3))
    client.recover()
    layer.flip = True
    assert client.scrub().damaged == 2
    layer.heal()
    found = metrics(node)
    assert (found["kvstore_disk_serving"], health(node)) == (1, (SERVING, SERVING))
    counts = {
        name: found[f"kvstore_disk_pages_{name}_total"]
        for name in ("corrupt", "refused", "written", "evicted")
    }
    assert counts == {"corrupt": 2, "refused": 1, "written": 2, "evicted": 0}


def test_pages_larger_than_disk_extents_stay_in_ram_and_evict_none(
    nodes: Nodes, pages: Pages
) -> None:
    """Regression: a page larger than the extents evicted all others, even durable ones."""
    node = nodes.start()
    keys = pages.keys(*range(50))
    pages.put(nodes.connect(node), keys, durable=True)
    node = nodes.restart(
        node, disk_extent_nbytes=0, extent_nbytes=256 << 10, batch_nbytes_max=256 << 10
    )
    client, large = nodes.connect(node), Pages("large", 128 << 10)
    assert large.put(client, large.keys(1)) == [PutOutcome.STORED]
    with pytest.raises(Exhausted, match="than the extents of data_dir"):
        large.put(client, large.keys(1), durable=True)
    with pytest.raises(Exhausted, match="than the extents of data_dir"):
        client.flush()
    for number in range(2, 12):  # RAM turns over, so deferred pages are offered to the disk
        large.put(client, large.keys(number))
    status = client.node_status()
    assert (status.state, status.disk.page_count, status.disk.pages_evicted) == ("SERVING", 50, 0)
    assert status.disk.pages_refused > 0
    assert pages.get(client, keys) == [True] * 50
    assert large.get(client, large.keys(11)) == [True]


def test_list_on_a_hanging_disk_is_answered_before_the_default_timeout() -> None:
    """The node answers a list on a hanging disk before the client's default timeout.

    A timeout would open the client's circuit breaker, also for pages in RAM.
    """
    assert ClientConfig().timeout_s >= QUESTION_S + 0.5


def test_extent_is_fully_allocated_at_its_first_page(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    extents = sorted((nodes.data_dir / "extents").iterdir())
    assert [path.stat().st_blocks for path in extents] == [0] * 32
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    taken = sorted(path.stat().st_blocks * 512 for path in extents)
    assert taken[:-1] == [0] * 31
    assert taken[-1] >= 64 << 10


def test_gets_that_wait_for_the_disk_are_counted_and_timed_apart(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client, keys = nodes.connect(node), pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    layer.reading.clear()
    reader = threading.Thread(target=pages.get, args=(client, keys))
    reader.start()
    assert layer.waiting.acquire(timeout=60.0)
    assert sample(node, 'kvstore_gets_waiting{tier="disk"}') == 1
    layer.reading.set()
    reader.join()
    pages.get(client, keys)
    assert sample(node, 'kvstore_gets_waiting{tier="disk"}') == 0
    for tier, count in (("disk", 1), ("ram", 1), ("peer", 0)):
        assert sample(node, f'kvstore_get_seconds_count{{tier="{tier}"}}') == count
    assert sample(node, 'kvstore_get_seconds_bucket{le="+Inf",tier="disk"}') == 1


def sample(node: Node, series: str) -> float:
    text = metrics_text(node.service)({}, HttpClient("127.0.0.1", ())).body().decode()
    (value,) = re.findall(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(value)
