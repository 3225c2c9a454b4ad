"""A call on several objects is split into parts.

The tests check the number of parts, the result when some of them fail, and the reported cause.
"""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from gpu_agent.objects.parts import (
    PARTS_MAX,
    Batch,
    Ended,
    ObjectName,
    ObjectPart,
    ObjectResults,
    cut,
)
from gpu_agent.objects.store import ObjectStore
from gpu_agent.options import AgentConfig
from kvstore.deadline import Deadline
from kvstore.errors import Unavailable
from kvstore.keys import Namespace
from kvstore.layout import PageLayout, opaque_layout
from kvstore.results import PutOutcome

NBYTES = 64
SCOPE = Namespace("objects", opaque_layout(1))


def names_of(count: int, nbytes: int = NBYTES) -> list[ObjectName]:
    return [
        ObjectName(SCOPE, bytes([i % 256, i // 256]) * 16, opaque_layout(nbytes))
        for i in range(count)
    ]


def space(scope: Namespace, layout: PageLayout) -> Namespace:
    return Namespace(scope.model, layout)


def parts_of(count: int) -> list[ObjectPart]:
    return cut(names_of(count), [memoryview(bytearray(NBYTES))] * count, space, Deadline(5.0))


def test_large_call_has_a_limited_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_agent.objects.parts.PART_NBYTES", 2 * NBYTES)
    assert [len(part.hashes) for part in parts_of(5)] == [2, 2, 1]
    assert len(parts_of(64 * PARTS_MAX)) == PARTS_MAX


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_failed_part_is_reported_in_any_order(order: tuple[int, int]) -> None:
    parts = [ObjectPart(SCOPE, [i], [b"k" * 32], [], Deadline(5.0)) for i in range(2)]
    ended = [Ended(parts[0], [None], "the node is away"), Ended(parts[1], [True], "")]
    batch: Batch[bool | None] = Batch(2, 2, None)
    assert [batch.end(ended[i]) for i in order] == [False, True]
    assert batch.done.result(0) == ObjectResults([None, True], "the node is away")


def test_local_timeout_does_not_mark_the_node_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is not called either."""
    calls, gate, later_s = list[Any](), threading.Event(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0])
    monkeypatch.setattr("kvstore.deadline.time", clock)

    def put(namespace: Namespace, hashes: list[bytes], views: Any, timeout_s: float) -> Any:
        calls.append(hashes)
        assert gate.wait(60.0)
        raise Unavailable("away")

    reported = list[Any]()
    config = AgentConfig(workers=1, save_timeout_s=60.0)
    store = ObjectStore(SimpleNamespace(put=put), config)  # type: ignore[arg-type]
    monkeypatch.setattr(store.outage, "report", reported.append)
    results = [store.put(names_of(1), [bytearray(NBYTES)]) for _ in range(2)]
    wait_until(lambda: calls)
    later_s[0] = 60.0
    gate.set()
    assert [call.result(60.0).values for call in results] == [[None]] * 2
    store.close()
    assert len(calls) == len(reported) == 1


def test_parts_touch_the_whole_chain_and_have_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts age a chain piece by piece, so it is touched as a whole at the end.

    Every call to the node has a deadline.
    """
    touched, calls, reported = threading.Event(), list[Any](), list[Any]()
    outcomes = iter([PutOutcome.FULL, PutOutcome.AWAY, PutOutcome.BUSY])

    def put(
        namespace: Namespace, hashes: list[bytes], views: Any, timeout_s: float
    ) -> list[PutOutcome]:
        return [next(outcomes) for _ in hashes]

    def lookup(namespace: Namespace, hashes: list[bytes], touch: bool, timeout_s: float) -> None:
        calls.append((hashes, touch, timeout_s))
        touched.set()

    def remove(namespace: Namespace, hashes: list[bytes], timeout_s: float) -> list[bool]:
        calls.append((hashes, None, timeout_s))
        return [True] * len(hashes)

    monkeypatch.setattr("gpu_agent.objects.parts.PART_NBYTES", NBYTES)
    client, names = SimpleNamespace(put=put, lookup=lookup, remove=remove), names_of(3)
    store = ObjectStore(client, AgentConfig(lookup_timeout_s=57.0))  # type: ignore[arg-type]
    monkeypatch.setattr(store.outage, "report", reported.append)
    store.put(names, [bytearray(NBYTES) for _ in names]).result(60.0)
    assert touched.wait(60.0)
    assert store.remove(names[:1]).result(60.0).values == [NBYTES]
    store.close()
    assert [(hashes, touch) for hashes, touch, _ in calls] == [
        ([name.prefix_hash for name in names], True),
        ([names[0].prefix_hash], None),
    ]
    assert all(0.0 < timeout_s <= 57.0 for *_, timeout_s in calls)
    assert (store.stats.refused, store.stats.existing) == (2, 1)
    assert reported == [None] * 5
