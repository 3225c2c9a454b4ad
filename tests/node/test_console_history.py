"""The console's history: samples of the last hour and day, in rings and in a file."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import small_nodes
from small_files import SmallFiles
from visits import first, history_of

from kvstore.security.identities import ALL, Principal, Role
from node.console.history import (
    DAY_EVERY_S,
    EVERY_S,
    FILE_NAME,
    KEPT,
    TENANTS_MAX,
    History,
    Latency,
    quantile,
)
from node.disk.data_dir import SMALL_NBYTES_MAX
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


def recent(history: History, who: Principal = OPERATOR, most: int = KEPT) -> dict[str, Any]:
    shown = history.visible_to(who, most)
    assert shown is not None
    found: dict[str, Any] = shown["recent"]
    return found


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
    shown = recent(history)
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
    assert recent(history, of("team-a"))["asked"] == [1.0]
    assert recent(history, of("team-b"))["asked"] == [100.0]
    assert recent(history)["asked"][-1] == 101.0
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
    shown = recent(history)
    assert shown["count"] == KEPT + 10
    assert len(shown["times"]) == len(shown["got"]) == KEPT
    assert shown["got"] == [float(number) for number in range(10, KEPT + 10)]
    assert recent(history, OPERATOR, 1)["got"] == [float(KEPT + 9)]
    assert len(recent(history, OPERATOR, 10 * KEPT)["got"]) == KEPT


def test_day_has_a_sample_of_every_five_minutes(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    for _ in range(int(2 * DAY_EVERY_S / EVERY_S)):
        spaces.of("team-a").pages_got += 30
        pass_by(EVERY_S)
    shown = history.visible_to(OPERATOR)
    assert shown is not None
    assert (shown["day"]["got"], shown["day"]["every_s"]) == ([3.0, 3.0], DAY_EVERY_S)
    assert len(shown["recent"]["got"]) == 2 * DAY_EVERY_S / EVERY_S


def test_dropped_counters_give_no_negative_rates(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    spaces.of("team-a").pages_asked = 100
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert recent(history, of("team-a"))["asked"] == [0.0]
    spaces.forgotten.add(spaces.by_tenant.pop("team-a"))
    spaces.forgotten.pages_asked += 10
    pass_by(EVERY_S)
    assert recent(history)["asked"][-1] == 10 / EVERY_S, (
        "counters of a forgotten namespace still count"
    )
    assert history.visible_to(of("team-a")) is None, "the tenant has no namespace any more"
    spaces.forgotten = Counters()
    pass_by(EVERY_S)
    assert recent(history)["asked"][-1] == 0.0


def test_history_keeps_a_limited_number_of_tenants(
    made: tuple[History, Spaces, Callable[[float], None]],
) -> None:
    history, spaces, pass_by = made
    for number in range(TENANTS_MAX + 20):
        spaces.of(f"team-{number}").pages_asked = 1
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert len(history._recent.rings) == TENANTS_MAX + 1
    assert recent(history)["asked"][0] == pytest.approx((TENANTS_MAX + 20) / EVERY_S, rel=1e-3), (
        "tenants over the limit count in the total"
    )
    spaces.by_tenant = dict(reversed(spaces.by_tenant.items()))
    pass_by(EVERY_S)
    pass_by(EVERY_S)
    assert len(history._recent.rings) == TENANTS_MAX + 1, "the order of tenants must not matter"
    assert len(recent(history, of("team-0"))["asked"]) == 3, "the first tenants keep their rings"


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
    shown = recent(history)
    assert shown["get_p50_ms"] == [pytest.approx(0.5556), None, 10.0]
    assert shown["get_p99_ms"] == [pytest.approx(9.1), None, 10.0]
    assert shown["put_p50_ms"] == [None, None, None]


def test_quantiles_lie_within_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 10, 0, 0], 0.5) == 1.5
    assert quantile(bounds, [0, 0, 0, 1], 0.5) == 4.0
    assert quantile(bounds, [1, 0, 0, 0], 0.99) == pytest.approx(0.99)
    assert math.isnan(quantile(bounds, [0, 0, 0, 0], 0.5))


# ---- kept over a restart ---------------------------------------------------------------------


def open_history(folder: Path, clock: Clock, wall_s: float = 1e9) -> tuple[History, Spaces]:
    spaces = Spaces()
    inventory: Any = spaces
    file = SmallFiles(folder).open(FILE_NAME)
    return History(inventory, None, clock=clock, wall=lambda: wall_s, file=file), spaces


def saved_history(folder: Path) -> None:
    clock = Clock()
    history, spaces = open_history(folder, clock)
    for _ in range(int(DAY_EVERY_S / EVERY_S) + 1):
        spaces.of("team-secret").pages_got += 10
        history.poll()
        clock.s += EVERY_S
    history.stop()


def reopened(folder: Path, wall_s: float = 1e9) -> dict[str, Any] | None:
    history, _ = open_history(folder, Clock(), wall_s)
    history.poll()
    history.stop()
    return history.visible_to(OPERATOR)


def test_history_is_kept_over_a_restart(tmp_path: Path) -> None:
    saved_history(tmp_path)
    shown = reopened(tmp_path)
    assert shown is not None
    assert shown["recent"]["got"] == [1.0] * int(DAY_EVERY_S / EVERY_S)
    assert shown["day"]["got"] == [1.0]
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_size < SMALL_NBYTES_MAX
    assert b"secret" not in file.read_bytes(), "samples of tenants are not saved"


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_damaged_history_begins_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_history(tmp_path)
    file = tmp_path / FILE_NAME
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(
        {
            "flipped": bytes(content),
            "cut": file.read_bytes()[:99],
            "empty": b"",
            "foreign": b"x" * 99,
        }[damage]
    )
    assert reopened(tmp_path) is None
    assert ("begins anew" in caplog.text) == (damage != "empty")


def test_history_with_other_columns_is_not_shown(tmp_path: Path) -> None:
    """A file of another release; its values would stand under wrong names."""
    saved_history(tmp_path)
    inventory: Any = Spaces()
    latency = Latency((0.001,), lambda: {})
    file = SmallFiles(tmp_path).open(FILE_NAME)
    history = History(inventory, None, latency, Clock(), lambda: 1e9, file)
    history.poll()
    history.stop()
    assert history.visible_to(OPERATOR) is None


def test_history_of_the_future_is_not_shown(tmp_path: Path) -> None:
    saved_history(tmp_path)
    assert reopened(tmp_path, wall_s=1e9 - 86400) is None


def test_latencies_of_the_last_minute_and_since_the_start() -> None:
    clock, counts = Clock(), {"get": [100, 0, 0]}
    inventory: Any = Spaces()
    history = History(inventory, None, Latency((0.001, 0.01), lambda: counts), clock)
    history.poll()
    for _ in range(9):
        clock.s += EVERY_S
        history.poll()
    counts["get"] = [100, 60, 0]
    (get,) = history.latencies()
    assert (get["op"], get["count"], get["per_s"]) == ("get", 160, 1.0)
    assert get["recent"]["p50"] == pytest.approx(5.5)
    assert get["since"]["p50"] == pytest.approx(0.8)


def test_node_with_a_data_directory_keeps_its_history(tmp_path: Path) -> None:
    with small_nodes() as start:
        node = start(data_dir=str(tmp_path))
        history = history_of(node)
        for _ in range(3):
            history._take(history._clock())
        times = first(node)["history"]["recent"]["times"]
        node.stop()
        later = start(data_dir=str(tmp_path))
        history_of(later)._take(history._clock())
        assert first(later)["history"]["recent"]["times"][: len(times)] == times
