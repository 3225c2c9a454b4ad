"""Request rates of tenants on a fake clock, and shares that quotas reduce."""

import pytest

from kvstore.errors import ConfigError, Exhausted
from node.auth.quotas import Quota, Quotas, quota_of
from node.serving.limits import Budget, ConnectionLimiter, QuotaLimits, make_limit
from node.serving.tenants import Rates


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def rates_of(**fields: int) -> tuple[Rates, Clock, Quotas, list[tuple[str, str]]]:
    quotas, clock, refused = Quotas(), Clock(), list[tuple[str, str]]()
    quotas.set({"a": Quota(**fields)})
    return Rates(quotas, lambda *what: refused.append(what), clock), clock, quotas, refused


def test_quota_fields_are_parsed() -> None:
    words = [
        "ram=4GiB",
        "disk=40GiB",
        "pins=1000",
        "held=1GiB",
        "connections=64",
        "requests=1000/s",
        "bytes=1GiB/s",
    ]
    fields = {name: text for name, _, text in (word.partition("=") for word in words)}
    assert quota_of(fields) == Quota(4 << 30, 40 << 30, 1000, 1 << 30, 64, 1000, 1 << 30)
    assert quota_of({}) == quota_of({"ram": "0"}) == Quota()


@pytest.mark.parametrize(
    "field",
    [
        "ram=4XB",
        "ram=-1",
        "ram=",
        "pins=1.5",
        "pins=\u0665",
        "requests=1000",
        "bytes=1GiB",
        "disk=99999999TiB",
        "held=inf",
    ],
)
def test_invalid_quota_field_is_named_without_its_value(field: str) -> None:
    name, _, text = field.partition("=")
    with pytest.raises(ConfigError, match=f"^{name} must be a number as in {name}=") as caught:
        quota_of({name: text})
    assert len(text) < 8 or text not in str(caught.value)


def test_unknown_quota_field_is_refused_without_its_name() -> None:
    with pytest.raises(ConfigError, match="ram, disk, pins") as caught:
        quota_of({"secret": "token"})
    assert "secret" not in str(caught.value)


def test_request_rate_allows_a_burst_of_one_second() -> None:
    rates, clock, _, refused = rates_of(requests_per_s=10)
    clock.now_s += 3600
    for _ in range(10):
        rates.take("a")
    with pytest.raises(
        Exhausted, match=r"tenant a has had the 10 requests a second of its quota; wait 0\.100 s"
    ):
        rates.take("a")
    clock.now_s += 0.11
    rates.take("a")
    with pytest.raises(Exhausted):
        rates.take("a")
    assert refused == [("a", "requests")] * 2
    for _ in range(100):
        rates.take("b")


def test_request_of_many_keys_counts_as_several() -> None:
    rates, clock, _, _ = rates_of(requests_per_s=10)
    rates.take("a", 4096)
    clock.now_s += 0.7
    with pytest.raises(Exhausted, match=r"wait 0\.100 s"):
        rates.take("a")
    clock.now_s += 0.11
    rates.take("a")


def test_large_batch_delays_the_next_request() -> None:
    rates, clock, _, _ = rates_of(nbytes_per_s=1000)
    rates.take("a")
    rates.charge("a", 5000)
    clock.now_s += 3.9
    with pytest.raises(Exhausted, match=r"1000 bytes a second of its quota; wait 0\.100 s"):
        rates.take("a")
    clock.now_s += 0.2
    rates.take("a")


def test_changed_rate_keeps_its_debt_and_removed_rate_is_forgotten() -> None:
    rates, _, quotas, _ = rates_of(requests_per_s=1)
    rates.take("a")
    quotas.set({"a": Quota(requests_per_s=1000)})
    with pytest.raises(Exhausted):
        rates.take("a")
    quotas.set({})
    assert rates._buckets == {}
    rates.take("a")


def test_tenant_quota_limits_its_share_and_hides_other_tenants() -> None:
    refused: list[str] = []
    most = {"a": 3, "b": 100}
    budget = Budget(
        make_limit("things", 20, "wait"),
        QuotaLimits(lambda tenant: most.get(tenant, 0), refused.append),
    )
    budget.take("tenant a", 3)
    with pytest.raises(Exhausted, match=r"^things: 3 of tenant a; allowed are 3 by its quota"):
        budget.take("tenant a")
    budget.take("tenant b", 10)
    with pytest.raises(Exhausted, match=r"^things: 10 of tenant b; allowed are 10 for one tenant"):
        budget.take("tenant b")
    budget.take("10.0.0.1", 7)
    with pytest.raises(Exhausted, match=r"^things: 0 of tenant c") as caught:
        budget.take("tenant c")
    assert "20" not in str(caught.value)
    assert refused == ["a", "b", "c"]


def test_identified_connection_counts_for_its_tenant() -> None:
    places = ConnectionLimiter(
        make_limit("connections", 8, "wait"), QuotaLimits(lambda tenant: 2, lambda tenant: None)
    )
    left: list[int] = []
    mine = [places.enter("10.0.0.1", lambda n=n: left.append(n)) for n in range(4)]  # type: ignore[misc]
    for place in mine[:2]:
        place.change("tenant a")
    with pytest.raises(Exhausted, match="2 of tenant a; allowed are 2 by its quota"):
        mine[2].change("tenant a")
    mine[0].idle()
    mine[2].change("tenant a")
    assert left == [0], "the tenant's longest idle connection must be evicted"
    for place in mine:
        place.close()
    assert places.count == 0
    assert places._counts == {}
