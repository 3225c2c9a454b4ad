"""`kvstore events` as a process: it publishes, goes on without the node, and ends at SIGTERM."""

import importlib.util
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli_runner import Kvstore

from kvstore import Client, Namespace
from kvstore.tools.node_process import NodeProcess

WAIT_S = 60
ANYWHERE = "tcp://127.0.0.1:*"
HAS_ZMQ = all(map(importlib.util.find_spec, ("zmq", "msgpack")))
with_zmq = pytest.mark.skipif(not HAS_ZMQ, reason="needs pyzmq and msgpack, of the extra `events`")


@pytest.fixture
def bridge(shared_node: NodeProcess, space: Namespace) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "kvstore", "events", "--json", "-a", shared_node.address]
    options = ["--model", space.model, "--endpoint", ANYWHERE, "--http", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@with_zmq
def test_events_are_published_until_sigterm(
    bridge: "subprocess.Popen[str]", client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    import msgpack
    import zmq

    assert bridge.stdout is not None
    lines = map(json.loads, bridge.stdout)
    (over_http,), (address,) = next(lines)["addresses"], next(lines)["addresses"]
    assert over_http.startswith("http://127.0.0.1:")
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    try:
        reader.connect(address)
        reader.subscribe(b"kv@")
        stored: set[bytes] = set()
        for expected in ({*hashes}, {*hashes[1:]}):
            while stored != expected:
                assert reader.poll(1000 * WAIT_S)
                for event in msgpack.unpackb(reader.recv_multipart()[2])[1]:
                    if event["type"] == "AllBlocksCleared":
                        stored.clear()
                    elif event["type"] == "BlockStored":
                        stored |= {*event["block_hashes"]}
                    else:
                        stored -= {*event["block_hashes"]}
            client.remove(space, hashes[:1])
        assert next(lines)["kind"] == "ready"
        allowed, most = resource.prlimit(bridge.pid, resource.RLIMIT_NOFILE)
        assert allowed == most, "a reader takes a descriptor"
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(WAIT_S) == 0
    finally:
        reader.close()
        context.destroy(linger=0)


@with_zmq
def test_events_go_to_a_router_that_listens(shared_node: NodeProcess) -> None:
    import zmq

    command = [sys.executable, "-m", "kvstore", "events", "--json", "-a", shared_node.address]
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    try:
        reader.bind(ANYWHERE)
        reader.subscribe(b"kv@")
        options = ["--router", reader.getsockopt_string(zmq.LAST_ENDPOINT), "--endpoint", "none"]
        with subprocess.Popen([*command, "--model", "m", *options]) as process:
            try:
                assert reader.poll(1000 * WAIT_S)
                assert reader.recv_multipart()[0] == b"kv@pool:kvstore@m"
            finally:
                process.kill()
    finally:
        reader.close()
        context.destroy(linger=0)


def test_queries_alone_report_a_node_that_does_not_answer() -> None:
    """A bridge without a feed listened, and nobody learned that it could answer nothing."""
    command = [sys.executable, "-m", "kvstore", "events", "--json", "-a", "127.0.0.1:1"]
    options = ["--model", "m", "--endpoint", "none", "--http", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = map(json.loads, process.stdout)
            assert next(lines)["addresses"][0].startswith("http://127.0.0.1:")
            assert next(lines)["kind"] == "away"
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.skipif(HAS_ZMQ, reason="pyzmq is installed")
def test_missing_extra_is_one_error(kvstore: Kvstore) -> None:
    ran = kvstore("events", "--model", "m")
    assert (ran.code, ran.stdout) == (2, "")
    assert "kvstore-llm[events]" in ran.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--endpoint", "none"),
        ("--model", ""),
        ("--refresh", "-1"),
        ("--refresh", "nan"),
        ("--hash", "md5"),
        ("--endpoint", "none", "--http", "x"),
        pytest.param(("--endpoint", "*:1"), marks=with_zmq),
        pytest.param(("--endpoint", "tcp://127.0.0.1:70000"), marks=with_zmq),
        pytest.param(("--router", "router:5557"), marks=with_zmq),
        pytest.param(("--router", "tcp://router:*"), marks=with_zmq),
        pytest.param(("--router", "tcp://router:0"), marks=with_zmq),
        ("--router", "tcp://router:1", "--endpoint", "none", "--replay", "tcp://*:5558"),
        pytest.param(("--model", "\udcff"), marks=with_zmq),
        pytest.param(
            ("--endpoint", "none", "--mooncake", ANYWHERE, "--pool", "\udcff"), marks=with_zmq
        ),
        pytest.param(("--endpoint", "tcp://192.0.2.1:1"), marks=with_zmq),
        pytest.param(("--hashes", "md5"), marks=with_zmq),
        pytest.param(("--mooncake", ANYWHERE, "--object-key", "x"), marks=with_zmq),
    ],
)
def test_wrong_settings_are_one_error(kvstore: Kvstore, options: tuple[str, ...]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ran = kvstore("events", "--model", "m", "--endpoint", ANYWHERE, *options)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)


def test_sigterm_ends_where_python_ignores_exceptions() -> None:
    code = """
import signal, sys, weakref
from kvstore.cli.routers.events import _leave
signal.signal(signal.SIGTERM, _leave)
gone = type("Gone", (), {})()
seen = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGTERM))
del gone
sys.exit("the signal was lost")
"""
    ran = subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S)
    assert ran.returncode == 0


@pytest.mark.parametrize("publish", [("--http", "0"), pytest.param((), marks=with_zmq)])
def test_ctrl_c_ends_it(shared_node: NodeProcess, publish: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvstore", "events", "--json", "-a", shared_node.address]
    options = ["--model", "m", "--endpoint", ANYWHERE if not publish else "none", *publish]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "listening"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


@with_zmq
def test_router_that_is_named_twice_gets_one_stream(
    kvstore: Kvstore, shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would clear what the other has told, and look like gaps."""
    import zmq

    found = []

    def publish(client: Client, model: str, tenant: str, make: Any, *rest: Any) -> None:
        with zmq.Context() as context:
            for publisher in make(lambda: context):
                found.append(publisher)
                publisher.close()

    monkeypatch.setattr("kvstore.bridge.bridge.publish", publish)
    before, router = signal.getsignal(signal.SIGTERM), ("--router", "tcp://127.0.0.1:9")
    try:
        options = ("--model", "m", "--endpoint", "none", "-a", shared_node.address)
        assert kvstore("events", *options, *router, *router).code == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(found) == 1
