"""The public surface of a node: health, reflection, metrics, status, stat and pins."""

import threading
import time
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import MethodDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from known_pages import Pages
from local_nodes import Connect, StartNode
from prometheus_client.parser import text_string_to_metric_families

from kvstore import PutOutcome
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node

SERVING = health_pb2.HealthCheckResponse.SERVING
PAGE = 4096


@pytest.fixture
def channel(node: Node) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        yield channel


@pytest.mark.parametrize("service", ["", "kvstore.KVStore"])
def test_health_says_serving(channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0).status == SERVING


def test_health_does_not_know_other_services(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="nobody"), timeout=5.0
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_whole_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = {
        "kvstore.KVStore",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert set(database.get_services()) == services
    described = DescriptorPool(database).FindServiceByName("kvstore.KVStore")
    ours = pb.DESCRIPTOR.services_by_name["KVStore"]
    assert [method.name for method in described.methods] == [method.name for method in ours.methods]
    put = MethodDescriptorProto()
    described.methods_by_name["Put"].CopyToProto(put)
    assert put.client_streaming
    lookup = described.methods_by_name["Lookup"].input_type
    assert [field.name for field in lookup.fields] == [
        "namespace",
        "prefix_hashes",
        "touch",
        "near",
        "wait_ms",
    ]


def metrics(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return samples by name, then by the values of their labels without the namespace."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as reply:
        text = reply.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "namespace")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_metrics_parse_and_count_calls(node: Node, connect: Connect, pages: Pages) -> None:
    client = connect(node)
    pages.put(client, pages.keys(0, 1))
    pages.put(client, pages.keys(0))
    pages.get(client, pages.keys(0, 9))
    client.lookup(pages.namespace, pages.keys(0, 8, 1))
    client.remove(pages.namespace, pages.keys(1))
    client.lookup(pages.namespace, pages.keys(1))
    model, found = (pages.namespace.model,), metrics(node.metrics.port)
    assert found["kvstore_serving"][()] == 1
    assert found["kvstore_ram_capacity_bytes"][()] == 16 << 20
    assert found["kvstore_namespace_pages"][model] == 1
    assert found["kvstore_put_pages_total"][model[0], "stored"] == 2
    assert found["kvstore_put_pages_total"][model[0], "exists"] == 1
    assert found["kvstore_get_pages_total"][model] == 1
    assert found["kvstore_get_misses_total"][model] == 1
    assert found["kvstore_lookup_pages_total"][model] == 4
    assert found["kvstore_lookup_prefix_hits_total"][model] == 1
    assert found["kvstore_lookup_misses_total"][model[0], "absent"] == 1
    assert found["kvstore_lookup_misses_total"][model[0], "removed"] == 1
    assert found["kvstore_put_bytes_total"][model] == 2 * PAGE
    for name in (
        "kvstore_sessions",
        "kvstore_private_bytes",
        "kvstore_ram_used_bytes",
        "kvstore_ram_pages",
    ):
        assert found[name][()] > 0
    for name in ("kvstore_ram_held_pages", "kvstore_ram_writing_pages", "kvstore_ram_pinned_pages"):
        assert found[name][()] == 0


def test_metrics_survive_a_model_name_of_any_kind(node: Node, connect: Connect) -> None:
    odd = Pages('a "quoted"\\name\nin two lines, é')
    odd.put(connect(node), odd.keys(0))
    end = time.monotonic() + 60.0  # a scrape may get the cached text of an earlier one
    while not (
        found := metrics(node.metrics.port)["kvstore_namespace_pages"].get((odd.namespace.model,))
    ):
        assert time.monotonic() < end, "the model's name is not in the metrics"
    assert found == 1


def test_pin_expires(start_node: StartNode, connect: Connect, pages: Pages) -> None:
    client = connect(start_node(ram_nbytes=128 << 10, extent_nbytes=64 << 10))
    keys = pages.keys(*range(16))
    pages.put(client, [*keys, *pages.keys(*range(16, 32))])
    assert client.pin(pages.namespace, [*keys, *pages.keys(99)], 0.2) == [True] * 16 + [False]
    assert all(0 < page.pin_ttl_ms <= 200 for page in client.stat(pages.namespace, keys))
    assert client.node_status().ram.pinned_count == 16
    while client.node_status().ram.pinned_count:
        threading.Event().wait(0.02)
    assert [page.pin_ttl_ms for page in client.stat(pages.namespace, keys)] == [0] * 16
    assert client.unpin(pages.namespace, keys) == [False] * 16
    assert pages.put(client, pages.keys(100)) == [PutOutcome.STORED]


def test_stat_describes_a_page(node: Node, connect: Connect, pages: Pages) -> None:
    client = connect(node)
    pages.put(client, pages.keys(0))
    here, absent = client.stat(pages.namespace, pages.keys(0, 1))
    assert (here.present, here.nbytes, len(here.checksum), here.holds) == (True, PAGE, 16, 0)
    assert here.idle_ms <= here.age_ms
    assert (absent.present, absent.nbytes, absent.checksum) == (False, 0, b"")


def test_status_adds_up(node: Node, connect: Connect) -> None:
    client = connect(node)
    small, large = Pages("small", PAGE), Pages("large", 10 * PAGE)
    small.put(client, small.keys(*range(5)))
    large.put(client, large.keys(0, 1))
    status = client.node_status()
    assert status.state == "SERVING"
    assert (status.bulk_port, status.metrics_port) == (node.bulk.port, node.metrics.port)
    classes = {size.slot_nbytes: size for size in status.ram.size_classes}
    assert (classes[10 * PAGE].used_count, classes[10 * PAGE].slot_count) == (2, 3)
    assert status.ram.used_nbytes == sum(
        size.slot_nbytes * size.used_count for size in classes.values()
    )
    assert status.ram.page_count == sum(size.used_count for size in classes.values())
    assert status.ram.extent_free_count == 15, "blocks of two sizes must share one extent"
