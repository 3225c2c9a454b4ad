"""Objects are received directly in the caller's memory.

Failures while they arrive are misses. Once a call has its result or was given up, nothing is
written to that memory any more.
"""

import hashlib
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from relays import WAIT_S, Relay
from relays import relayed as relayed
from waiting import PATIENT, wait_until

from gpu_agent import AgentConfig
from gpu_agent.objects.parts import ObjectName
from gpu_agent.objects.store import ANY, ObjectStore
from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.tools.node_process import NodeProcess

NBYTES = 1 << 20
HALF = NBYTES // 2
TIME_S = 0.5  # of a load that will fail


class Stored:
    """Three objects in the node, and a store whose loads have a short timeout."""

    def __init__(self, client: Client, load_s: float = TIME_S) -> None:
        scope = Namespace(uuid.uuid4().hex, ANY, revision="1")
        layout = opaque_layout(NBYTES)
        self.namespace = Namespace(scope.model, layout, revision="1")
        self.names = [
            ObjectName(scope, hashlib.sha256(b"%d" % i).digest(), layout) for i in range(3)
        ]
        self.sources = list(torch.randint(1, 256, (3, NBYTES), dtype=torch.uint8))
        self.targets = list(torch.zeros((3, NBYTES), dtype=torch.uint8))
        self.objects = ObjectStore(
            client, AgentConfig(load_timeout_s=load_s, save_timeout_s=WAIT_S)
        )
        self.objects.put(self.names, self.sources).result(WAIT_S)

    def get(self) -> list[bool | None]:
        return self.objects.get(self.names, self.targets).result(WAIT_S).values

    def reuse(self) -> None:
        """Overwrite the memory, as a caller does once it owns the memory again."""
        for target in self.targets:
            target.zero_()

    @property
    def written(self) -> bool:
        return any(target.any() for target in self.targets)


@pytest.fixture
def stored(relayed: tuple[Client, Relay]) -> Iterator[Stored]:
    made = Stored(relayed[0])
    yield made
    relayed[1].go_on.set()
    made.objects.close()


def untouched(stored: Stored, relay: Relay) -> bool:
    """Return whether memory stays unchanged after the call, when the node's bytes arrive late."""
    stored.reuse()
    relay.go_on.set()
    threading.Event().wait(0.3)  # in which they would be received
    return not stored.written


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_objects_are_received_in_the_callers_memory(shared_node: NodeProcess, wire: str) -> None:
    with Client(ClientConfig(address=shared_node.address, wire=wire, **PATIENT)) as client:
        stored = Stored(client, load_s=WAIT_S)
        assert stored.objects.get(stored.names, stored.targets).result(WAIT_S).values == [True] * 3
        assert torch.equal(torch.stack(stored.targets), torch.stack(stored.sources))
        stored.objects.close()


def test_stalled_page_writes_nothing_after_the_result(
    stored: Stored, relayed: tuple[Client, Relay]
) -> None:
    relay = relayed[1]
    relay.pass_on(NBYTES + HALF, "stall")
    assert stored.get() == [None] * 3
    assert relay.stalled.is_set()
    assert stored.written, "the page did not stall in its middle"
    assert untouched(stored, relay)


def test_close_returns_once_a_stalled_page_can_not_arrive(
    stored: Stored, relayed: tuple[Client, Relay]
) -> None:
    relay = relayed[1]
    relay.pass_on(HALF, "stall")
    loading = stored.objects.get(stored.names, stored.targets)
    assert relay.stalled.wait(WAIT_S)
    stored.objects.close()
    assert loading.result(0).values == [None] * 3
    assert untouched(stored, relay)


def test_interrupted_call_writes_nothing_afterwards(
    stored: Stored, relayed: tuple[Client, Relay]
) -> None:
    client, relay = relayed
    relay.pass_on(HALF, "stall")

    def interrupt() -> None:
        if relay.stalled.wait(WAIT_S):
            wait_until(lambda: stored.written)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.get(
                stored.namespace,
                [name.prefix_hash for name in stored.names],
                stored.targets,
                timeout_s=WAIT_S,
            )
    finally:
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
    assert untouched(stored, relay)


def test_truncated_answer_is_a_miss(stored: Stored, relayed: tuple[Client, Relay]) -> None:
    relayed[1].pass_on(NBYTES + HALF, "close")
    results = stored.objects.get(stored.names, stored.targets).result(WAIT_S)
    assert results.values == [None] * 3
    assert results.error


def test_damaged_object_is_a_miss_and_others_are_hits(
    stored: Stored, relayed: tuple[Client, Relay]
) -> None:
    """Each object is verified by its own checksum, and the node keeps its intact copy."""
    relayed[1].pass_on(NBYTES + HALF, "flip")
    assert stored.get() == [True, False, True]
    assert torch.equal(stored.targets[0], stored.sources[0])
    assert torch.equal(stored.targets[2], stored.sources[2])
    assert stored.get() == [True] * 3
    assert relayed[0].stats.corrupt_pages == 1


def test_bytes_after_the_last_page_are_discarded(
    stored: Stored, relayed: tuple[Client, Relay]
) -> None:
    """The answer itself is correct; bytes after it end the connection."""
    relay = relayed[1]
    accepted = relay.accepted
    relay.pass_on(3 * NBYTES, "more")
    assert stored.get() == [True] * 3
    stored.reuse()
    assert stored.get() == [True] * 3
    assert torch.equal(torch.stack(stored.targets), torch.stack(stored.sources))
    assert relay.accepted > accepted
