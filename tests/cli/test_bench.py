"""`kvstore bench` leaves no pages behind, notices wrong bytes and refuses invalid options."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore import Client, Namespace
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.tools.bench import BenchOptions, bench, latency_ms

QUICK = BenchOptions(page_nbytes=4096, batch=4, threads=2, seconds=0.2)


def pages_of_bench(client: Client) -> int:
    return sum(
        info.page_count
        for namespace, info in client.namespaces()
        if namespace.model == "kvstore-bench"
    )


def test_bench_verifies_all_reads_and_removes_its_pages(client: Client) -> None:
    seen: list[float] = []
    report = bench(client, QUICK, seen.append)
    assert report.verified_nbytes == report.get.calls * QUICK.batch * QUICK.page_nbytes > 0
    assert (report.mismatches, report.pages_full, report.pages_lost) == (0, 0, 0)
    assert report.put.gb_per_s > 0
    assert report.wire == client.wire_name
    assert seen
    assert pages_of_bench(client) == 0


class LyingClient(Client):
    """A client whose gets return hits without reading."""

    def get(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], *_: Any, **__: Any
    ) -> list[bool]:
        return [True] * len(prefix_hashes)


def test_get_that_reads_nothing_is_a_mismatch(client: Client) -> None:
    with LyingClient(client.config) as liar:
        report = bench(liar, QUICK)
    assert report.mismatches == report.get.calls * QUICK.batch > 0
    assert report.verified_nbytes == 0


class TiringClient(Client):
    """A client whose gets read once, and return hits without reading afterwards."""

    reads = 0

    def get(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], *rest: Any, **options: Any
    ) -> list[bool]:
        self.reads += 1
        return (
            super().get(namespace, prefix_hashes, *rest, **options)
            if self.reads == 1
            else [True] * QUICK.batch
        )


def test_bytes_of_an_earlier_round_do_not_pass_for_a_read(client: Client) -> None:
    with TiringClient(client.config) as tiring:
        report = bench(tiring, dataclasses.replace(QUICK, threads=1, seconds=0.5))
    assert report.verified_nbytes == QUICK.batch * QUICK.page_nbytes
    assert report.mismatches == (report.get.calls - 1) * QUICK.batch


class BrokenClient(Client):
    def lookup(self, *_: Any, **__: Any) -> Any:
        raise Unavailable("gone")


def test_error_ends_the_bench_and_removes_its_pages(client: Client) -> None:
    with BrokenClient(client.config) as broken, pytest.raises(Unavailable, match="gone"):
        bench(broken, BenchOptions(page_nbytes=4096, batch=4, threads=2, seconds=60))
    assert pages_of_bench(client) == 0


@pytest.mark.parametrize(
    "values",
    [{"page_nbytes": 0}, {"batch": 0}, {"threads": 0}, {"seconds": 0}, {"page_nbytes": 1 << 40}],
)
def test_options_out_of_range_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(values)).removesuffix("_nbytes")):
        BenchOptions(**values)


def test_percentiles_use_the_nearest_rank() -> None:
    assert latency_ms([n / 1000 for n in range(100, 0, -1)]) == {
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
    }
    assert latency_ms([0.002]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert latency_ms([]) == {}
