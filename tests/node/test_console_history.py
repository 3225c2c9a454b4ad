"""The console's history: samples of the last hour per tenant, in rings of fixed size."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.security.identities import ALL, Principal, Role
from node.console.history import EVERY_S, KEPT, TENANTS_MAX, History, Latency, quantile
from node.memory.page import Counters

OPERATOR = Principal("operator", ALL, Role.READ)


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


class Spaces:
    """A fake inventory: namespaces of tenants and their counters."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, Counters] = {}
        self.forgotten = Counters()

    def of(self, tenant: str) -> Counters:
        return self.by_tenant.setdefault(tenant, Counters())

    def counted(self, read: Callable[[Counters], Any]) -> tuple[Any, list[tuple[Any, Any, int]]]:
        each = []
        for tenant, counters in self.by_tenant.items():
            index = SimpleNamespace(
                value=SimpleNamespace(tenant=tenant), digest=tenant.encode(), page_nbytes=100
            )
            each.append((index, read(counters), 3))
        return read(self.forgotten), each


def of(tenant: str, *models: str) -> Principal:
    return Principal("one", tenant, Role.READ, models)


@pytest.fixture
def made() -> tuple[History, Spaces, Callable[[float], None]]:
    clock, spaces = Clock(), Spaces()
    inventory: Any = spaces
    history = History(inventory, lambda digest: 2, clock=clock)

    def pass_by(seconds: float) -> None:
        clock.s += seconds
        history.poll()

    history.poll()
    return history, spaces, pass_by


def test_sample_is_the_change_per_second(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    spaces.of("team-a").pages_asked = 50
    pass_by(EVERY_S / 2)
    assert history.visible_to(OPERATOR) is None, "the first sample is not due yet"
    pass_by(EVERY_S / 2)
    spaces.of("team-a").pages_asked += 40
    spaces.of("team-b").nbytes_got += 1000
    pass_by(2 * EVERY_S)
    shown = history.visible_to(OPERATOR)
    assert shown["asked"] == [50 / EVERY_S, 40 / EVERY_S / 2]
    assert shown["got_nbytes"] == [0.0, 1000 / EVERY_S / 2]
    assert shown["ram_nbytes"] == [300.0, 600.0]
    assert shown["disk_nbytes"] == [200.0, 400.0]
    assert "get_p99_ms" not in shown, "no latency source was given"


def test_tenant_sees_only_its_own_history(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    for tenant in ("team-a", "team-b"):
        spaces.of(tenant)
    pass_by(EVERY_S)
    for tenant, pages in (("team-a", 10), ("team-b", 1000)):
        spaces.of(tenant).pages_asked += pages
    pass_by(EVERY_S)
    assert history.visible_to(of("team-a"))["asked"] == [1.0]
    assert history.visible_to(of("team-b"))["asked"] == [100.0]
    assert history.visible_to(OPERATOR)["asked"][-1] == 101.0
    assert history.visible_to(of("team-c")) is None
    assert history.visible_to(of("team-a", "llama-*")) is None, (
        "tenant history includes other models"
    )
    assert history.visible_to(of(ALL, "llama-*")) is None


def test_console_history_keeps_one_hour(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    for number in range(KEPT + 10):
        spaces.of("team-a").pages_got = 10 * number * (number + 1) // 2
        pass_by(EVERY_S)
    shown = history.visible_to(OPERATOR)
    assert shown["count"] == KEPT + 10
    assert len(shown["times"]) == len(shown["got"]) == KEPT
    assert shown["got"] == [float(number) for number in range(10, KEPT + 10)]
    assert history.visible_to(OPERATOR, 1)["got"] == [float(KEPT + 9)]
    assert len(history.visible_to(OPERATOR, 10 * KEPT)["got"]) == KEPT


def test_dropped_counters_give_no_negative_rates(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    spaces.of("team-a").pages_asked = 100
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert history.visible_to(of("team-a"))["asked"] == [0.0]
    spaces.forgotten.add(spaces.by_tenant.pop("team-a"))
    spaces.forgotten.pages_asked += 10
    pass_by(EVERY_S)
    assert history.visible_to(OPERATOR)["asked"][-1] == 10 / EVERY_S, (
        "counters of a forgotten namespace still count"
    )
    assert history.visible_to(of("team-a")) is None, "the tenant has no namespace any more"
    spaces.forgotten = Counters()
    pass_by(EVERY_S)
    assert history.visible_to(OPERATOR)["asked"][-1] == 0.0


def test_history_keeps_a_limited_number_of_tenants(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    for number in range(TENANTS_MAX + 20):
        spaces.of(f"team-{number}").pages_asked = 1
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert len(history._rings) == TENANTS_MAX + 1
    assert history.visible_to(OPERATOR)["asked"][0] == pytest.approx(
        (TENANTS_MAX + 20) / EVERY_S, rel=1e-3
    ), "tenants over the limit count in the total"
    spaces.by_tenant = dict(reversed(spaces.by_tenant.items()))
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert len(history._rings) == TENANTS_MAX + 1, "the order of tenants must not matter"
    assert len(history.visible_to(of("team-0"))["asked"]) == 3, "the first tenants keep their rings"


def test_latency_quantiles_appear_with_a_latency_source() -> None:
    clock, spaces = Clock(), Spaces()
    counts = {"get": [0, 0, 0]}
    inventory: Any = spaces
    history = History(inventory, None, Latency((0.001, 0.01), lambda: counts), clock)
    history.poll()
    for more in ([90, 10, 0], [0, 0, 0], [0, 0, 5]):
        counts["get"] = [old + new for old, new in zip(counts["get"], more, strict=True)]
        clock.s += EVERY_S
        history.poll()
    shown = history.visible_to(OPERATOR)
    assert shown is not None
    assert shown["get_p50_ms"] == [pytest.approx(0.5556), None, 10.0]
    assert shown["get_p99_ms"] == [pytest.approx(9.1), None, 10.0]
    assert shown["put_p50_ms"] == [None, None, None]


def test_quantiles_lie_within_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 10, 0, 0], 0.5) == 1.5
    assert quantile(bounds, [0, 0, 0, 1], 0.5) == 4.0
    assert quantile(bounds, [1, 0, 0, 0], 0.99) == pytest.approx(0.99)
    assert math.isnan(quantile(bounds, [0, 0, 0, 0], 0.5))
