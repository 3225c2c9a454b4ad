"""A node ends a gateway that sends invalid messages or floods it, and goes on serving.

The node is in the test's process; its gateway is a short program of the test, in a process of its
own.
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import SMALL
from gateway_processes import is_running
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.certificates import Pems
from node.auth.access import THE_NODE
from node.config import NodeConfig
from node.gateway import supervisor
from node.gateway.supervisor import Port
from node.server import Node
from node.serving.gateway import GatewayDoor, connections_max

BEGIN = """
import json, os, signal, socket, sys, time
control, door = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
lives, seen = sys.argv[3:5]
lines = control.makefile("rb")
first = not os.path.exists(seen)
open(seen, "a").write(f"{os.getpid()}\\n")

def say(**message):
    control.sendall(json.dumps(message).encode() + b"\\n")

def heard():
    line = lines.readline()
    if not line:
        os._exit(0)
    return json.loads(line)

settings = heard()["settings"]
"""
OBEY = """
say(ready=1)
while True:
    say(beat={"rss_nbytes": 1, "call_count": 0})
    if "stop" in heard():
        os._exit(0)
"""


class Fake:
    """A factory of nodes whose gateway runs a given program."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = folder / "seen"
        self._folder = folder
        self._patch = monkeypatch
        self.nodes: list[Node] = []

    def start(self, program: str, then: str = "", **settings: Any) -> Node:
        """Start a node whose gateway runs `program`, then `then`.

        In the program, `first` is True until the gateway has been restarted. OBEY as `then` makes
        it behave well.
        """
        text, arguments = (
            BEGIN + textwrap.dedent(program) + then,
            (str(self._folder), str(self.seen)),
        )

        class Process(supervisor.GatewayProcess):
            def __init__(self, control: Any, door: Any, config: NodeConfig, held: Port) -> None:
                fds = control.fileno(), door.fileno()
                command = [sys.executable, "-I", "-S", "-c", text, *map(str, fds), *arguments]
                self._process = subprocess.Popen(command, pass_fds=fds)
                self.pid = self._process.pid

        self._patch.setattr(supervisor, "GatewayProcess", Process)
        node = Node(NodeConfig(**{**SMALL, **settings}), gateway_processes=True)
        self.nodes.append(node)
        node.start()
        return node

    @property
    def pids(self) -> list[int]:
        """Return the ids of all gateway processes so far."""
        return [int(pid) for pid in self.seen.read_text().split()] if self.seen.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = Fake(tmp_path, monkeypatch)
    yield made
    for node in made.nodes:
        node.stop()
    wait_until(lambda: not any(map(is_running, made.pids)))


def ends(node: Node) -> int:
    return sum(node.grpc.ends.values())


def status(node: Node) -> Any:
    return node.service.call("node_status", pb.NodeStatusRequest(), THE_NODE)


MESSAGES = {
    "no JSON": b"garbage\n",
    "no UTF-8": b"\xff\xfe\n",
    "no object": b"5\n",
    "deep": b"[" * 100_000 + b"\n",
    "a beat that is none": b'{"beat": 5}\n',
    "a beat of more": b'{"beat": {"pid": 1}}\n',
    "a beat below nothing": b'{"beat": {"rss_nbytes": -1}}\n',
    "a beat above all": b'{"beat": {"call_count": 99999999999999999999999999}}\n',
    "a number that is long": b'{"beat": {"call_count": ' + b"9" * 60_000 + b"}}\n",
    "a reason that is none": b'{"failed": {"a": [1]}}\n',
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_gateway_that_sends_an_invalid_message_is_ended(fake: Fake, message: bytes) -> None:
    """A gateway that sends an invalid message is ended; it would listen beside its successor."""
    node = fake.start(
        f"""
        say(ready=1)
        if first:
            heard()
            control.sendall({message!r})
            time.sleep(1000)
        """,
        then=OBEY,
    )
    wait_until(lambda: len(fake.pids) == 2)
    wait_until(lambda: not is_running(fake.pids[0]))
    wait_until(lambda: status(node).gateways[0].ready)
    assert ends(node) == 1


def test_gateway_with_an_endless_line_is_ended_before_it_fills_memory(fake: Fake) -> None:
    node = fake.start(
        """
        say(ready=1)
        sent = 0
        if first:
            while True:
                sent += control.send(bytes(1 << 16))
                open(seen + ".sent", "w").write(str(sent))
        """,
        then=OBEY,
    )
    wait_until(lambda: len(fake.pids) == 2)
    wait_until(lambda: not is_running(fake.pids[0]))
    # Empty if the gateway was killed while it wrote the file
    assert int(Path(f"{fake.seen}.sent").read_text() or 0) < 16 << 20
    assert ends(node) == 1


def test_gateway_that_sends_other_descriptors_can_still_connect(fake: Fake) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node = fake.start(
        """
        say(ready=1)
        file = os.open("/dev/null", os.O_RDONLY)
        for count in range(300):
            socket.send_fds(door, [b"c"], [file])
            socket.send_fds(door, [b"c"], [file] * 200)
            door.send(b"c")
        ours, theirs = socket.socketpair()
        socket.send_fds(door, [b"c"], [theirs.fileno()])
        theirs.close()
        open(seen + ".done", "w").close()
        """,
        then=OBEY,
    )
    wait_until(Path(f"{fake.seen}.done").exists)
    assert any(thread.name.startswith("gateway-0-accept") for thread in threading.enumerate())
    wait_until(connections)
    node.stop()
    fake.nodes.clear()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_gateway_that_floods_connections_gets_limited_threads(fake: Fake) -> None:
    node = fake.start(
        """
        import threading
        say(ready=1)
        def flood():
            kept = []
            for count in range(450):
                ours, theirs = socket.socketpair()
                socket.send_fds(door, [b"c"], [theirs.fileno()])
                theirs.close()
                try:
                    ours.send(bytes([16, 0, 0]))  # half a frame
                except BrokenPipeError:
                    pass  # refused
                kept.append(ours)
            open(seen + ".done", "w").close()
            time.sleep(1000)
        threading.Thread(target=flood, daemon=True).start()
        """,
        then=OBEY,
        grpc_threads=4,
    )
    wait_until(Path(f"{fake.seen}.done").exists)
    most = connections_max(4)
    assert most < 450
    wait_until(lambda: connections() == most)
    with Client(ClientConfig(f"bulk://127.0.0.1:{node.bulk.port}", timeout_s=30.0)) as client:
        assert client.node_status().gateways[0].ready
    node.stop()
    fake.nodes.clear()
    wait_until(lambda: connections() == 0)


def connections() -> int:
    return sum(thread.name.startswith("gateway-0-gateway") for thread in threading.enumerate())


def test_stop_does_not_wait_for_a_starting_gateway(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "READY_S_MAX", 1000.0)
    node = fake.start(
        """
        if first:
            say(ready=1)
            time.sleep(0.5)
            os._exit(0)
        time.sleep(1000)
        """,
        drain_s=100.0,
    )
    wait_until(lambda: len(fake.pids) == 2)
    began = time.monotonic()
    node.stop()
    assert time.monotonic() - began < 60.0
    fake.nodes.clear()


def test_certificates_changed_during_a_gateway_start_reach_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    pems = [Pems(b"old", b"old", b"old")]
    monkeypatch.setattr(supervisor.Gateways, "pems", property(lambda self: pems[0]))

    def begin() -> None:
        fake.start("""
            while not os.path.exists(seen + ".go"):
                time.sleep(0.01)
            say(ready=1)
            while True:
                message = heard()
                say(beat={"rss_nbytes": 1, "call_count": 0})
                if message.get("pems"):
                    open(seen + ".pems", "w").write(message["pems"]["key"])
                if "stop" in message:
                    os._exit(0)
            """)

    thread = threading.Thread(target=begin)
    thread.start()
    wait_until(lambda: fake.pids)
    pems[0] = Pems(b"new", b"new", b"new")
    fake.nodes[0].grpc.look()
    Path(f"{fake.seen}.go").touch()
    thread.join()
    received = Path(f"{fake.seen}.pems")
    wait_until(lambda: received.exists() and received.read_text() == "new")


def test_gateway_that_pauses_reading_gets_the_newest_state(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that reads nothing for a while gets the newest state, even with a small buffer."""
    monkeypatch.setattr("node.gateway.control.SEND_NBYTES", 106_496)
    node = fake.start("""
        say(ready=1)
        while not os.path.exists(seen + ".go"):
            say(beat={"rss_nbytes": 1, "call_count": 0})
            time.sleep(0.1)
        while True:
            message = heard()
            say(beat={"rss_nbytes": 1, "call_count": 0})
            if "newest" in message.get("health", {}):
                open(seen + ".newest", "w").close()
            if "stop" in message:
                os._exit(0)
        """)
    for number in range(20_000):
        node.grpc._set_health({"other": bool(number % 2)})
    node.grpc._set_health({"newest": True})
    Path(f"{fake.seen}.go").touch()
    wait_until(Path(f"{fake.seen}.newest").exists)
    assert ends(node) == 0


def test_failed_gateway_start_leaves_no_descriptors(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake.start(
        """
        if first:
            say(ready=1)
            while not os.path.exists(seen + ".go"):
                say(beat={"rss_nbytes": 1, "call_count": 0})
                time.sleep(0.1)
            os._exit(0)
        """,
        then=OBEY,
    )
    monkeypatch.setattr(supervisor, "PAUSE_S_MAX", 0.01)
    before, start = len(os.listdir("/proc/self/fd")), GatewayDoor.start
    fails = [RuntimeError("can't start new thread")] * 60

    def fail(self: Any) -> None:
        if fails:
            raise fails.pop()
        start(self)

    monkeypatch.setattr(GatewayDoor, "start", fail)
    Path(f"{fake.seen}.go").touch()
    wait_until(lambda: len(fake.pids) == 2 and status(node).gateways[0].ready)
    assert len(os.listdir("/proc/self/fd")) <= before + 10
