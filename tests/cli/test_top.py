"""`kvstore top`: rates from counters."""

from kvstore.cli.top import sample
from kvstore.pb import kvstore_pb2 as pb


def state(instance: bytes = b"i", **counters: int) -> pb.NodeStatusReply:
    totals = pb.Counters(**counters)
    space = pb.NamespaceInfo(digest=b"d" * 16, namespace=pb.Namespace(model="m"), counters=totals)
    return pb.NodeStatusReply(instance_id=instance, totals=totals, namespaces=[space])


def test_rates_are_differences_by_the_time_between() -> None:
    values = sample(state(pages_asked=10, nbytes_put=100), state(pages_asked=30, nbytes_put=1100), 2.0)
    assert values["totals"]["asked_per_s"] == values["namespaces"][0]["asked_per_s"] == 10.0
    assert values["totals"]["put_nbytes_per_s"] == 500.0


def test_a_restarted_node_counts_from_zero() -> None:
    values = sample(state(b"old", pages_asked=1000), state(b"new", pages_asked=6), 2.0)
    assert values["restarted"]
    assert values["totals"]["asked_per_s"] == values["namespaces"][0]["asked_per_s"] == 3.0


def test_a_namespace_that_was_forgotten_and_came_back_has_no_negative_rate() -> None:
    before, now = state(pages_put=50), state(pages_put=50)
    now.namespaces[0].counters.pages_put = 4
    assert sample(before, now, 1.0)["namespaces"][0]["put_per_s"] == 0.0


def test_a_new_namespace_counts_from_zero() -> None:
    before = state()
    del before.namespaces[:]
    assert sample(before, state(pages_got=8), 4.0)["namespaces"][0]["got_per_s"] == 2.0
