"""Objects through a real node: batches with holes round-trip, and failures are values.

test_objects_arrive.py tests failures while bytes arrive.
"""

import contextlib
import dataclasses
import hashlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from waiting import PATIENT

from gpu_agent import AgentConfig
from gpu_agent.objects import parts
from gpu_agent.objects.parts import ObjectName
from gpu_agent.objects.store import ANY, ObjectStore
from kvstore import Client, ClientConfig, InvalidRequest, Namespace, PutOutcome, opaque_layout
from kvstore.tools.node_process import NodeProcess

NBYTES = 100_001  # not a multiple of any size
WAIT_S = 60.0
CONFIG = AgentConfig(
    staging_nbytes=1 << 20, lookup_timeout_s=1.0, load_timeout_s=30.0, save_timeout_s=30.0
)


@pytest.fixture
def store(client: Client) -> Iterator[ObjectStore]:
    objects = ObjectStore(client, CONFIG)
    yield objects
    objects.close()
    assert objects.check() == []


@pytest.fixture
def scope() -> Namespace:
    return Namespace(uuid.uuid4().hex, ANY, revision="1")


def names_of(scope: Namespace, count: int, nbytes: int | None = NBYTES) -> list[ObjectName]:
    layout = None if nbytes is None else opaque_layout(nbytes)
    return [ObjectName(scope, hashlib.sha256(b"%d" % i).digest(), layout) for i in range(count)]


def contents(count: int, nbytes: int = NBYTES) -> list[torch.Tensor]:
    return list(torch.randint(0, 256, (count, nbytes), dtype=torch.uint8))


def empty(count: int, nbytes: int = NBYTES) -> list[torch.Tensor]:
    return list(torch.zeros((count, nbytes), dtype=torch.uint8))


def test_round_trip_of_a_batch_with_holes(store: ObjectStore, scope: Namespace) -> None:
    names, sources = names_of(scope, 7), contents(7)
    put = store.put(names[::2], sources[::2]).result(WAIT_S)
    assert (put.values, put.error) == ([PutOutcome.STORED] * 4, "")
    assert store.exists(names).result(WAIT_S).values == [True, False] * 3 + [True]
    targets = empty(7)
    got = store.get(names, targets).result(WAIT_S)
    assert (got.values, got.error) == ([True, False] * 3 + [True], "")
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        assert torch.equal(target, source if i % 2 == 0 else torch.zeros_like(source))
    assert (store.stats.stored, store.stats.loaded, store.stats.missed, store.stats.found) == (
        4,
        4,
        3,
        4,
    )


def test_round_trip_of_many_sizes_and_scopes_in_one_call(
    store: ObjectStore, scope: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts have a few objects each, and one object is larger than a part."""
    monkeypatch.setattr(parts, "PART_NBYTES", 3000)
    monkeypatch.setattr(parts, "PARTS_MAX", 1 << 20)
    other = Namespace(scope.model, ANY, revision="2")
    sizes = [1000, 1, 5000, 1000, CONFIG.staging_nbytes + 3, 1000, 1000, 5000]
    names = [
        ObjectName(
            (scope, other)[i % 2], hashlib.sha256(b"%d" % (i // 2)).digest(), opaque_layout(nbytes)
        )
        for i, nbytes in enumerate(sizes)
    ]
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    assert set(store.put(names, sources).result(WAIT_S).values) == {PutOutcome.STORED}
    targets = [torch.zeros_like(source) for source in sources]
    assert all(store.get(names, targets).result(WAIT_S).values)
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_storing_again_transfers_nothing(store: ObjectStore, scope: Namespace) -> None:
    names, sources = names_of(scope, 3), contents(3)
    store.put(names, sources).result(WAIT_S)
    again = store.put([*names, names[0]], [*contents(3), sources[0]]).result(WAIT_S)
    assert again.values == [PutOutcome.EXISTS] * 4
    targets = empty(3)
    assert store.get(names, targets).result(WAIT_S).values == [True] * 3
    assert torch.equal(torch.stack(targets), torch.stack(sources))


def test_object_of_another_length_is_a_miss(store: ObjectStore, scope: Namespace) -> None:
    store.put(names_of(scope, 2), contents(2)).result(WAIT_S)
    for nbytes in (NBYTES - 1, NBYTES + 1):
        targets = empty(2, nbytes)
        assert store.get(names_of(scope, 2, nbytes), targets).result(WAIT_S).values == [False] * 2
        assert not torch.stack(targets).any()


def test_object_of_another_process_is_found_without_its_size(
    client: Client, store: ObjectStore, scope: Namespace
) -> None:
    unknown = names_of(scope, 3, None)
    assert store.exists(unknown).result(WAIT_S).values == [False] * 3
    other = ObjectStore(client, CONFIG)
    other.put(names_of(scope, 2), contents(2)).result(WAIT_S)
    other.put(names_of(scope, 3, 77)[2:], contents(1, 77)).result(WAIT_S)
    other.close()
    end = time.monotonic() + WAIT_S
    # The node is asked for new objects at most every two seconds.
    while store.exists(unknown).result(WAIT_S).values != [True] * 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert store.remove([*unknown, unknown[0]]).result(WAIT_S).values == [NBYTES, NBYTES, 77, 0]
    assert store.exists(unknown).result(WAIT_S).values == [False] * 3
    assert store.remove(unknown).result(WAIT_S).values == [0] * 3


def test_empty_call_returns_an_empty_result(store: ObjectStore) -> None:
    assert store.put([], []).result(WAIT_S).values == []
    assert store.get([], []).result(WAIT_S).values == []
    assert store.exists([]).result(WAIT_S).values == []


def test_invalid_call_raises_at_once(store: ObjectStore, scope: Namespace) -> None:
    for names, views in (
        (names_of(scope, 2), contents(1)),
        (names_of(scope, 1), contents(1, NBYTES - 1)),
        (names_of(scope, 1, None), contents(1)),
    ):
        with pytest.raises(InvalidRequest):
            store.put(names, views)
    with pytest.raises(InvalidRequest, match="read-only"):
        store.get(names_of(scope, 1, 3), [b"abc"])


def test_damaged_object_is_a_miss(shared_node: NodeProcess, scope: Namespace) -> None:
    """In place, the slot's bytes are changed after they were stored.

    Requirement 5 covers the other wires.
    """
    names, sources = names_of(scope, 3), contents(3)
    layout = opaque_layout(NBYTES)
    with Client(ClientConfig(address=shared_node.address, wire="shm", **PATIENT)) as client:
        store = ObjectStore(client, CONFIG)
        store.put(names, sources).result(WAIT_S)
        namespace = Namespace(scope.model, layout, revision="1")
        with client.open_get(namespace, [names[1].prefix_hash]) as slots:
            slots.arena.memory[slots.offsets[0] + 50_000] ^= 1
        targets = empty(3)
        assert store.get(names, targets).result(WAIT_S).values == [True, False, True]
        assert store.exists(names).result(WAIT_S).values == [
            True,
            False,
            True,
        ]  # the node has dropped the object
        store.close()


class HeldClient:
    """A client whose loads block until the gate is open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.entered, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, *arguments: Any, **options: Any) -> list[bool]:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return self._client.get(*arguments, **options)


def test_close_returns_when_nothing_can_touch_a_view(client: Client, scope: Namespace) -> None:
    held = HeldClient(client)
    store = ObjectStore(held, CONFIG)  # type: ignore[arg-type]
    names, sources = names_of(scope, 2), contents(2)
    store.put(names, sources).result(WAIT_S)
    targets = empty(2)
    running = store.get(names, targets)
    assert held.entered.wait(WAIT_S)
    queued = [store.get(names, empty(2)) for _ in range(20)]
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()  # a thread is still working
    held.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert running.result(0).values == [True] * 2
    assert all(future.result(0).values in ([None] * 2, [True] * 2) for future in queued)
    assert store.put(names, sources).result(0).values == [None] * 2
    assert store.exists(names).result(0).values == [False] * 2


def test_hung_node_costs_deadlines_and_killed_node_nothing(scope: Namespace) -> None:
    """The test runs over two wires in turn, each with objects of its own."""
    config = AgentConfig(
        staging_nbytes=1 << 20, lookup_timeout_s=0.3, load_timeout_s=0.5, save_timeout_s=0.5
    )
    wires, flags = ("shm", "bulk"), ("--ram-bytes", "64MiB")
    with contextlib.ExitStack() as stack:
        port = str(free_port())  # not an ephemeral one, which an outgoing connection could take
        node = stack.enter_context(NodeProcess(*flags, "--port", port))
        stores = []
        for wire in wires:
            client = Client(
                ClientConfig(address=node.address, wire=wire, backoff_s_max=0.3, **PATIENT)
            )
            stores.append(ObjectStore(stack.enter_context(client), config))
            stack.callback(stores[-1].close)
        scopes = [dataclasses.replace(scope, revision=wire) for wire in wires]
        objects = [(store, names_of(mine, 4)) for store, mine in zip(stores, scopes, strict=True)]
        for store, names in objects:
            check_hung_node(node, store, names)
        node.kill()
        for store, names in objects:
            assert store.exists(names).result(WAIT_S).error
        stack.enter_context(NodeProcess(*flags, "--port", port))  # empty, at the same address
        for store, names in objects:
            sources, targets = contents(4), empty(4)
            assert eventually(partial(is_stored, store, names, sources))
            assert eventually(partial(is_loaded, store, names, targets))
            assert torch.equal(torch.stack(targets), torch.stack(sources))


def check_hung_node(node: NodeProcess, store: ObjectStore, names: list[ObjectName]) -> None:
    sources, targets = contents(4), empty(4)
    assert eventually(partial(is_stored, store, names, sources))
    signal_node(node, signal.SIGSTOP)
    assert eventually(lambda: all_threads_stopped(node))
    start = time.monotonic()
    calls = [store.get(names, targets), store.put(names, sources), store.exists(names)]
    calls += [store.get(names, targets) for _ in range(120)]
    results = [call.result(WAIT_S) for call in calls]
    assert time.monotonic() - start < 40.0  # a deadline for each call would be 60
    assert all(result.error for result in results)
    assert not any(results[0].values)
    assert not any(results[2].values)
    signal_node(node, signal.SIGCONT)
    assert eventually(lambda: all(store.get(names, targets).result(WAIT_S).values))


def all_threads_stopped(node: NodeProcess) -> bool:
    """Return whether all threads of the node have stopped; that takes a moment after a signal."""
    threads = Path(f"/proc/{node.pid}/task").iterdir()
    try:
        return all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads
        )
    except (FileNotFoundError, ProcessLookupError):  # a thread that was ending
        return False


def signal_node(node: NodeProcess, number: signal.Signals) -> None:
    os.kill(node.pid, number)


def is_stored(store: Any, names: Any, sources: Any) -> bool:
    store.put(names, sources).result(WAIT_S)
    return is_loaded(store, names, empty(len(names)))


def is_loaded(store: Any, names: Any, targets: Any) -> bool:
    return all(store.get(names, targets).result(WAIT_S).values)


def eventually(condition: Any) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
