"""Known layouts are learned from use and from the node, refreshed rarely, and bounded."""

from dataclasses import replace
from typing import Any

import pytest

from gpu_agent.objects import store
from gpu_agent.objects.store import ANY, FIRST_S, LAYOUTS_MAX, REFRESH_S, KnownLayouts
from kvstore import Namespace, opaque_layout
from kvstore.deadline import Deadline

SCOPE = Namespace("m", ANY, revision="1")


class FakeClient:
    def __init__(self) -> None:
        self.stored: list[Namespace] = []
        self.calls = 0

    def namespaces(self, timeout_s: float) -> list[tuple[Namespace, Any]]:
        self.calls += 1
        return [(namespace, None) for namespace in self.stored]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_used_layout_is_known() -> None:
    known = KnownLayouts(FakeClient())  # type: ignore[arg-type]
    assert known.of(SCOPE) == []
    small = known.namespace(SCOPE, opaque_layout(10))
    assert small == replace(SCOPE, layout=opaque_layout(10))
    assert known.namespace(SCOPE, opaque_layout(10)) is small
    known.namespace(SCOPE, opaque_layout(20))
    known.namespace(replace(SCOPE, revision="2"), opaque_layout(30))
    assert [namespace.layout.page_nbytes for namespace in known.of(SCOPE)] == [10, 20]


def test_refresh_is_rate_limited() -> None:
    client, clock = FakeClient(), Clock()
    known = KnownLayouts(client, clock)  # type: ignore[arg-type]
    client.stored = [replace(SCOPE, layout=opaque_layout(7)), Namespace("other", opaque_layout(8))]
    assert known.refresh(Deadline(1.0))
    assert [namespace.layout.page_nbytes for namespace in known.of(SCOPE)] == [7]
    assert not known.refresh(Deadline(1.0))
    clock.now += FIRST_S + 0.01
    assert not known.refresh(Deadline(1.0))
    assert known.refresh(Deadline(1.0), FIRST_S)
    clock.now += REFRESH_S + 0.01
    assert known.refresh(Deadline(1.0))
    assert client.calls == 3


def test_both_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownLayouts(FakeClient())  # type: ignore[arg-type]
    for nbytes in range(1, LAYOUTS_MAX + 4):
        known.namespace(SCOPE, opaque_layout(nbytes))
    assert [namespace.layout.page_nbytes for namespace in known.of(SCOPE)] == list(
        range(4, LAYOUTS_MAX + 4)
    )
    monkeypatch.setattr(store, "SCOPES_MAX", 3)
    for revision in "23":
        known.namespace(replace(SCOPE, revision=revision), opaque_layout(1))
    assert known.of(SCOPE)
    known.namespace(replace(SCOPE, revision="4"), opaque_layout(1))
    assert known.of(SCOPE) == []  # learned again when used again
    assert known.of(replace(SCOPE, revision="4"))
