"""Strangers who flood the gRPC port of a node: it lives, its memory stays, and who is served by
other wires still is.

Each attack lasts a moment here; `benchmarks/floods.py` has the long ones, with figures.
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

ATTACK_S = 1.5
PATIENT_S = 60.0  # of calls: on a busy machine they take long, and must not fail
QUIET_CALLS = 20  # after which a node has what it needs to serve them
GROWTH_NBYTES_MAX = (16 + 8) << 20  # the aim, and what a node's own work moves it by
PLAIN = [name for name, attack in ATTACKS.items() if attack.tls]
CASES = [("open", name) for name in PLAIN]
CASES += [
    (mode, name)
    for mode in ("token", "mtls")
    for name in ("continuation-12", "hang-up", "tls-stalled", "tls-half")
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
    """A node, with innocents who are served over bulk and shared memory."""

    def __init__(self, mode: Mode) -> None:
        self.mode, self.node = mode, start_node(mode)
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
        """Wait until each innocent has made so many more calls; return the errors of all, with
        their wires.
        """
        errors: list[str] = []
        for innocent in self.innocents:
            made = 0
            end = time.monotonic() + PATIENT_S
            while made < count:
                assert time.monotonic() < end, f"an innocent is not served over {innocent.wire}"
                taken = innocent.take()
                made += len(taken)
                errors += [
                    f"{innocent.wire} {call.op}: {call.error}" for call in taken if call.error
                ]
                threading.Event().wait(0.01)
        return errors

    def status(self) -> tuple[int, bytes]:
        """Return (pid, instance id), asked over gRPC by a new client."""
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


@pytest.mark.parametrize(("besieged", "attack"), CASES, indirect=["besieged"])
def test_a_node_under_a_flood_lives_keeps_its_memory_and_serves(
    besieged: Besieged, attack: str
) -> None:
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
    assert attackers.counts["bytes"] > 0 or besieged.mode.name == "mtls", "nobody said anything"
    assert node.running
    assert besieged.calls(QUIET_CALLS) == []
    wait_until(besieged.served_again)
    assert besieged.status() == before, "the node was restarted"
    growth = max(highest, memory(node.pid)["RssAnon"]) - private
    assert growth < GROWTH_NBYTES_MAX, f"the node's private memory grew by {growth >> 20} MiB"


def test_the_tool_sees_memory(tmp_path: Path) -> None:
    before = memory(os.getpid())["RssAnon"]
    # Mapped, because an allocation may get memory that this process had already.
    taken = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken.write(os.urandom(len(taken)))
    assert memory(os.getpid())["RssAnon"] - before > len(taken) // 2
