"""Floods of a node's gRPC port: the node lives, its memory stays, and clients of other wires are
served.

Each attack is short here; `benchmarks/floods.py` runs long ones and measures them.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS
from besieged import SOURCES, Attackers, Mode, memory, mode_of, start_node
from innocents import Innocent
from waiting import wait_until

from kvstore import Client, ClientConfig, KVStoreError
from kvstore.tools.node_process import NodeProcess

RAM_NBYTES = 64 << 20  # the clients have 32 pages of 1 MiB
ATTACK_S = 1.0
PATIENT_S = 60.0  # timeout of calls: on a busy machine they take long, and must not fail
QUIET_CALLS = 20  # after them a node has allocated what it needs to serve them
GROWTH_NBYTES_MAX = (16 + 8) << 20  # the limit, plus what a node's own work varies by
PLAIN = [name for name, attack in ATTACKS.items() if attack.tls]
# One attack of each kind: endless headers, streams, large messages, half a TLS handshake
SHORT = {("open", name) for name in ("continuation-12", "rapid-reset", "gzip-bombs")}
SHORT |= {("token", "tls-half")}
CASES = [("open", name) for name in PLAIN]
CASES += [
    (mode, name)
    for mode in ("token", "mtls")
    for name in ("continuation-12", "hang-up", "tls-stalled", "tls-half")
]
PARAMETERS = [
    pytest.param(*case, marks=() if case in SHORT else pytest.mark.long) for case in CASES
]


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mode]:
    made: dict[str, Mode] = {}

    def of(name: str) -> Mode:
        if name not in made:
            made[name] = mode_of(name, Path(tmp_path_factory.mktemp(name)))
        return made[name]

    return of


class Besieged:
    """A node under attack, with clients that are served over bulk and shared memory."""

    def __init__(self, mode: Mode) -> None:
        self.mode, self.node = mode, start_node(mode, "--ram-bytes", str(RAM_NBYTES))
        settings: dict[str, Any] = {
            "address": self.node.address,
            "timeout_s": PATIENT_S,
            "connect_timeout_s": 20.0,
            **mode.client,
        }
        self._settings = settings
        self.innocents = [Innocent(wire=wire, **settings) for wire in ("bulk", "shm")]
        for innocent in self.innocents:
            innocent.begin()

    def calls(self, count: int) -> list[str]:
        """Wait until each client has made `count` more calls.

        Return their errors, each with its wire.
        """
        errors: list[str] = []
        for innocent in self.innocents:
            made = 0
            end = time.monotonic() + PATIENT_S
            while made < count:
                assert time.monotonic() < end, f"a client is not served over {innocent.wire}"
                taken = innocent.take()
                made += len(taken)
                errors += [
                    f"{innocent.wire} {call.op}: {call.error}" for call in taken if call.error
                ]
                threading.Event().wait(0.01)
        return errors

    def status(self) -> tuple[int, bytes]:
        """Return the pid and instance id of the node, asked over gRPC by a new client."""
        with Client(
            ClientConfig(
                **{**self._settings, "wire": "grpc", "timeout_s": 5.0, "connect_timeout_s": 5.0}
            )
        ) as client:
            status = client.node_status()
            return status.pid, status.instance_id

    def served_again(self) -> bool:
        try:
            self.status()
        except KVStoreError:
            return False
        return True

    def end(self) -> None:
        for innocent in self.innocents:
            innocent.end()
        self.node.stop(PATIENT_S)


@pytest.fixture
def besieged(request: pytest.FixtureRequest, modes: Callable[[str], Mode]) -> Iterator[Besieged]:
    made = Besieged(modes(request.param))
    yield made
    made.end()


@pytest.mark.parametrize(("besieged", "attack"), PARAMETERS, indirect=["besieged"])
def test_flooded_node_keeps_its_memory_and_serves(besieged: Besieged, attack: str) -> None:
    node: NodeProcess = besieged.node
    assert besieged.calls(QUIET_CALLS) == []
    before, private = besieged.status(), memory(node.pid)["RssAnon"]
    highest = 0
    with Attackers(attack, node.address, SOURCES["many"], besieged.mode.tls) as attackers:
        end = time.monotonic() + ATTACK_S
        while time.monotonic() < end:
            highest = max(highest, memory(node.pid).get("RssAnon", 0))
            threading.Event().wait(0.02)
        assert attackers.running
    assert attackers.counts["bytes"] > 0 or besieged.mode.name == "mtls", (
        "the attackers sent nothing"
    )
    assert node.running
    assert besieged.calls(QUIET_CALLS) == []
    wait_until(besieged.served_again)
    assert besieged.status() == before, "the node was restarted"
    growth = max(highest, memory(node.pid)["RssAnon"]) - private
    assert growth < GROWTH_NBYTES_MAX, f"the node's private memory grew by {growth >> 20} MiB"


def test_memory_probe_sees_an_allocation(tmp_path: Path) -> None:
    before = memory(os.getpid())["RssAnon"]
    # Mapped, because an allocation may reuse memory that this process already has.
    taken = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken.write(os.urandom(len(taken)))
    assert memory(os.getpid())["RssAnon"] - before > len(taken) // 2
