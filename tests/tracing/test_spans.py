"""Spans of one trace, from the client through the near node and owners to the disk, as recorded by
OpenTelemetry.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import SMALL
from local_nodes import StartNode, stop_all
from waiting import wait_until

from kvstore import Client, ClientConfig, KVStoreError, Namespace, opaque_layout, otel, tracing
from kvstore.cluster.view import Member, View
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named, request
from kvstore.transports.connections import exchange
from kvstore.transports.frames import FrameSocket
from node.config import NodeConfig
from node.server import Node

PAGES = Namespace("llama", opaque_layout(4096))
KEYS = [bytes([i]) * 32 for i in range(1, 25)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartNode]:
    nodes: list[Node] = []

    def started(**settings: Any) -> Node:
        nodes.append(
            Node(
                NodeConfig(
                    **{**SMALL, "shm_socket": str(tmp_path / f"{len(nodes)}.sock"), **settings}
                )
            )
        )
        nodes[-1].start()
        return nodes[-1]

    yield started
    stop_all(nodes)


def client(node: Node, wire: str, **settings: Any) -> Client:
    known = {"timeout_s": 30.0, "connect_timeout_s": 20.0, **settings}
    return Client(ClientConfig(f"127.0.0.1:{node.grpc.port}", wire=wire, **known))


def steps(recorded: Any, name: str) -> list[Any]:
    return [span for span in recorded.get_finished_spans() if span.name == name]


def ids(span: Any) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent(span: Any) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent else None


@pytest.mark.parametrize("wire", ["bulk", "shm", "grpc"])
def test_span_of_a_node_is_a_child_of_the_caller(
    recorded: Any, start: StartNode, wire: str
) -> None:
    node = start()
    with client(node, wire) as caller:
        caller.open(PAGES)
        recorded.clear()
        caller.lookup(PAGES, KEYS)
        wait_until(lambda: steps(recorded, "kvstore.lookup"))
    (asked,), (served,) = steps(recorded, "kvstore.call"), steps(recorded, "kvstore.lookup")
    assert parent(served) == ids(asked)
    assert (asked.kind.name, served.kind.name) == ("CLIENT", "SERVER")
    assert asked.attributes["address"] == f"127.0.0.1:{node.grpc.port}"


@pytest.mark.parametrize("wire", ["bulk", "shm", "grpc"])
def test_read_from_disk_is_a_child_span_of_its_get(
    recorded: Any, start: StartNode, wire: str, tmp_path: Path
) -> None:
    node = start(data_dir=str(tmp_path / "data"), disk_nbytes=64 << 20)
    with client(node, wire) as caller:
        caller.put(PAGES, KEYS, [bytes(4096)] * len(KEYS))
        caller.flush()
        with node.tier.lock:
            index = node.tier.namespaces.find(PAGES.digest)
        wait_until(lambda: not node.tier.held_count)
        with node.tier.lock:
            for page in list(index.pages.values()):
                node.tier.forget(page, "evicted")
        recorded.clear()
        buffers = [bytearray(4096) for _ in KEYS]
        assert all(caller.get(PAGES, KEYS, buffers))
        assert all(caller.get(PAGES, KEYS, buffers))
        wait_until(lambda: len(steps(recorded, "kvstore.get")) == 2)
    (load,) = steps(recorded, "kvstore.load")
    first = min(steps(recorded, "kvstore.get"), key=lambda span: span.start_time)
    assert parent(load) == ids(first), "only the first get loads the page from disk"
    assert load.attributes["tier"] == "disk"


def test_trace_continues_through_the_near_node_to_the_owner(
    recorded: Any, start: StartNode
) -> None:
    nodes = [start(), start()]
    members = [Member(f"n{i}", f"127.0.0.1:{node.grpc.port}") for i, node in enumerate(nodes)]
    for i, node in enumerate(nodes):
        node.peers.rebalancer.settle_s = 1e6
        node.membership.become(View("fleet", 1, tuple(members), 1), f"n{i}")
    with client(nodes[0], "bulk", near="none") as far:
        far.put(PAGES, KEYS, [bytes(4096)] * len(KEYS))
    recorded.clear()
    with client(nodes[0], "bulk", near="n0") as near, request("cmpl-7"):
        assert all(near.get(PAGES, KEYS, [bytearray(4096) for _ in KEYS]))
        wait_until(lambda: len(steps(recorded, "kvstore.get")) == 2)
    trace = int.from_bytes(named("cmpl-7").trace_id, "big")
    served = {
        span.context.span_id: span
        for span in recorded.get_finished_spans()
        if span.context.trace_id == trace
    }
    (load,) = steps(recorded, "kvstore.load")
    assert load.attributes["tier"] == "peer"

    def path_of(step: Any) -> list[str]:
        return [] if step is None else [step.name, *path_of(served.get(step.parent.span_id))]

    assert max(map(path_of, steps(recorded, "kvstore.get")), key=len) == [
        "kvstore.get",
        "kvstore.call",
        "kvstore.load",
        "kvstore.get",
        "kvstore.call",
    ]
    for node in nodes:
        node.membership.become(
            View("fleet", 2, (members[nodes.index(node)],), 1), f"n{nodes.index(node)}"
        )


def test_span_of_the_engine_is_the_parent(recorded: Any, start: StartNode) -> None:
    from opentelemetry import trace

    with (
        client(start(), "bulk") as caller,
        trace.get_tracer("engine").start_as_current_span("generate") as engine,
        request("cmpl-7"),
    ):
        caller.lookup(PAGES, KEYS)
    of = engine.get_span_context()
    assert parent(steps(recorded, "kvstore.call")[-1]) == (of.trace_id, of.span_id)


def test_span_for_several_requests_is_linked_to_all(recorded: Any, start: StartNode) -> None:
    with client(start(), "bulk") as caller, request("a", "b", "c"), tracing.span("kvstore.save"):
        caller.lookup(PAGES, KEYS)
        now = tracing.current()
        wait_until(lambda: steps(recorded, "kvstore.lookup"))
    (save,), (served,) = steps(recorded, "kvstore.save"), steps(recorded, "kvstore.lookup")
    assert [save.context.trace_id, *(link.context.trace_id for link in save.links)] == [
        int.from_bytes(named(name).trace_id, "big") for name in "abc"
    ]
    assert now is not None
    assert [other.trace_id for other in now.others] == [named(name).trace_id for name in "bc"]
    assert served.context.trace_id == save.context.trace_id
    assert not served.links, "the other requests were sent to the node"


def test_call_without_a_request_name_begins_a_trace(recorded: Any, start: StartNode) -> None:
    with client(start(), "bulk") as caller:
        for _ in range(2):
            with request():
                caller.lookup(PAGES, KEYS)
                caller.lookup(PAGES, KEYS)
        wait_until(lambda: len(steps(recorded, "kvstore.lookup")) == 4)
    roots = steps(recorded, "kvstore.request")
    assert [parent(root) for root in roots] == [None, None]
    of = [span.context.trace_id for span in steps(recorded, "kvstore.lookup")]
    assert sorted(of) == sorted(2 * [root.context.trace_id for root in roots])


def test_failed_span_has_the_error(recorded: Any) -> None:
    with pytest.raises(KVStoreError), tracing.span("kvstore.test"):
        raise KVStoreError("no such page")
    (failed,) = steps(recorded, "kvstore.test")
    assert failed.status.status_code.name == "ERROR"
    assert "no such page" in failed.status.description
    assert tracing.current() is None


@pytest.mark.parametrize("trace", [b"x", bytes(25), b"x" * 100])
def test_invalid_trace_does_not_refuse_a_call(start: StartNode, trace: bytes) -> None:
    with socket.create_connection(("127.0.0.1", start().bulk.port), timeout=20.0) as plain:
        frames = FrameSocket(plain)
        frames.arm(30.0)
        hello = pb.BulkRequest(hello=pb.HelloRequest(), trace=trace)
        frames.send_frame(hello.SerializeToString())
        header, _ = frames.recv_frame(1 << 20)
        assert pb.BulkReply.FromString(header).hello.version
        assert exchange(frames, "hello", pb.HelloRequest())[0].version


def test_missing_exporter_fails_the_start_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nobodys")
    monkeypatch.setattr(tracing, "tracer", None)
    with pytest.raises(ConfigError, match="nobodys"):
        otel.set_up("kvstore-node")
    assert tracing.tracer is None


def test_node_process_uses_the_named_exporter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with NodeProcess(
        "--ram-bytes", "16MiB", "--shm-socket", "none", "--log-format", "json"
    ) as node:
        lines = [json.loads(line) for line in node.log_text.splitlines()]
    assert any("traces go to console" in line["message"] for line in lines)


@pytest.mark.parametrize("wire", ["bulk", "shm", "grpc"])
def test_log_of_a_node_names_the_request_of_the_engine(
    start: StartNode, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's log and errors name the engine's request, even without OpenTelemetry."""
    node, seen = start(), list[str]()

    def broken(*_: Any) -> None:
        current = tracing.current()
        seen.append(current.request_id if current else "")
        raise RuntimeError("broken")

    with client(node, wire) as caller:
        caller.open(PAGES)
        monkeypatch.setitem(node.service._unary, "stat", broken)
        for ask in (request("cmpl-7"), contextlib.nullcontext()):
            with (
                ask,
                pytest.raises(KVStoreError, match=r"see request [0-9a-f]{32} in the node"),
            ):
                caller.stat(PAGES, KEYS[:1])
    assert seen == [named("cmpl-7").request_id, ""]
