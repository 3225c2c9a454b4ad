"""Rates of tenants, by a clock that is moved by hand, and shares that quotas make smaller."""

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


def test_a_quota_is_written_as_in_the_documents() -> None:
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
        "ram=4GB",
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
def test_a_wrong_field_is_named_and_not_repeated(field: str) -> None:
    name, _, text = field.partition("=")
    with pytest.raises(ConfigError, match=f"^{name} must be a number as in {name}=") as caught:
        quota_of({name: text})
    assert len(text) < 8 or text not in str(caught.value)


def test_an_unknown_field_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="ram, disk, pins") as caught:
        quota_of({"secret": "token"})
    assert "secret" not in str(caught.value)


def test_so_many_requests_a_second_and_no_more_than_a_seconds_worth_at_once() -> None:
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


def test_a_request_of_many_keys_counts_as_several() -> None:
    rates, clock, _, _ = rates_of(requests_per_s=10)
    rates.take("a", 4096)
    clock.now_s += 0.7
    with pytest.raises(Exhausted, match=r"wait 0\.100 s"):
        rates.take("a")
    clock.now_s += 0.11
    rates.take("a")


def test_a_batch_larger_than_a_seconds_bytes_is_had_and_paid_for_before_the_next() -> None:
    rates, clock, _, _ = rates_of(nbytes_per_s=1000)
    rates.take("a")
    rates.charge("a", 5000)
    clock.now_s += 3.9
    with pytest.raises(Exhausted, match=r"1000 bytes a second of its quota; wait 0\.100 s"):
        rates.take("a")
    clock.now_s += 0.2
    rates.take("a")


def test_a_rate_that_is_gone_is_forgotten_and_one_that_was_changed_holds() -> None:
    rates, _, quotas, _ = rates_of(requests_per_s=1)
    rates.take("a")
    quotas.set({"a": Quota(requests_per_s=1000)})
    with pytest.raises(Exhausted):
        rates.take("a")
    quotas.set({})
    assert rates._buckets == {}
    rates.take("a")


def test_a_tenants_quota_is_less_than_the_share_of_a_peer_and_tells_of_no_other() -> None:
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


def test_a_connection_that_is_known_now_counts_to_its_tenant() -> None:
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
    assert left == [0], "the longest idle of the tenant left for it"
    for place in mine:
        place.close()
    assert places.count == 0
    assert places._counts == {}
