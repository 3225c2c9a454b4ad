"""Replay: hit rates compared with an exact LRU, and detection of wrong bytes."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import pytest
from waiting import PATIENT

from kvstore import Client, ClientConfig, LookupResult, Namespace, PutOutcome
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.tools.replay import ReplayReport, replay, replay_namespace, throwaway_node
from kvstore.tools.trace import TraceRequest, page_content, trace_prefix_hash

PAGE_NBYTES = 300  # not a multiple of the slots' alignment


def chained_trace(seed: int, count: int) -> list[TraceRequest]:
    """Return requests of a few concurrent conversations that grow turn by turn.

    Each hash id has one parent.
    """
    rng = random.Random(seed)
    conversations: list[list[int]] = []
    requests, next_id = [], 0
    for number in range(count):
        if not conversations or rng.random() < 0.2:
            conversations.append([])
        chain = conversations[-1 - min(int(rng.expovariate(0.4)), len(conversations) - 1)]
        if len(chain) > 25:
            chain = conversations[-1] = []
        for _ in range(rng.randint(1, 4)):
            chain.append(next_id)
            next_id += 1
        requests.append(TraceRequest(number, 0, 0, tuple(chain)))
    return requests


def lru_pages_hit(requests: Sequence[TraceRequest], capacity: int) -> int:
    """Return the number of leading pages found in an exact LRU touched from tail to head."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for hash_id in request.hash_ids:
            if hash_id not in cache:
                break
            hits += 1
        for hash_id in reversed(request.hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


class FakeStore:
    """An unbounded store in a dict that can be made to return one page wrongly."""

    wire_name = "fake"

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.flip: tuple[bytes, int] | None = None  # (key, position) of a byte to flip in gets
        self.untouched: bytes | None = None  # key whose get is a hit without bytes
        self.vanished: bytes | None = None  # key that lookup finds and get does not
        self.full = False

    def lookup(self, namespace: Namespace, prefix_hashes: Sequence[bytes]) -> LookupResult:
        present = [h in self.pages for h in prefix_hashes]
        return LookupResult((*present, False).index(False), tuple(present))

    def get(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], buffers: Any, prefix: bool
    ) -> list[bool]:
        assert prefix
        for prefix_hash, buffer in zip(prefix_hashes, buffers, strict=True):
            if prefix_hash != self.untouched:
                buffer[:] = self.pages[prefix_hash]
            if self.flip and prefix_hash == self.flip[0]:
                buffer[self.flip[1]] ^= 1
        hits = [h != self.vanished for h in prefix_hashes]
        run = (*hits, False).index(False)
        return [True] * run + [False] * (len(hits) - run)

    def put(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], pages: Any
    ) -> list[PutOutcome]:
        if self.full:
            raise Exhausted("all pages are pinned")
        outcomes = [
            PutOutcome.EXISTS if h in self.pages else PutOutcome.STORED for h in prefix_hashes
        ]
        for prefix_hash, page in zip(prefix_hashes, pages, strict=True):
            expected = page_content(namespace.digest, prefix_hash, namespace.layout.page_nbytes)
            assert bytes(page) == expected, "a page was put with wrong bytes"
            self.pages.setdefault(prefix_hash, bytes(page))
        return outcomes


CAPACITIES = (30, 150, 5000)


@pytest.mark.parametrize(
    "capacity",
    [pytest.param(c, marks=[] if c == 150 else [pytest.mark.long]) for c in CAPACITIES],
)
def test_hit_rate_is_that_of_an_exact_lru_touched_from_the_tail(capacity: int) -> None:
    trace = chained_trace(seed=7, count=400)
    asked = sum(len(request.hash_ids) for request in trace)
    with (
        throwaway_node(capacity, PAGE_NBYTES) as node,
        Client(ClientConfig(address=node.address, **PATIENT)) as client,
    ):
        report = replay(client, trace, replay_namespace(PAGE_NBYTES))
        assert client.node_status().ram.page_count <= capacity
    hits = lru_pages_hit(trace, capacity)
    assert (report.requests, report.pages_asked, report.pages_hit) == (400, asked, hits)
    assert report.prefix_hit_rate == hits / asked
    assert report.verified_nbytes == hits * PAGE_NBYTES
    assert (report.mismatches, report.pages_full, report.pages_lost) == (0, 0, 0)
    assert set(report.latency_ms["get"]) == {"p50", "p90", "p99"}


def test_capacities_give_different_hit_rates() -> None:
    trace = chained_trace(seed=7, count=400)
    rates = [lru_pages_hit(trace, capacity) for capacity in CAPACITIES]
    assert rates == sorted(set(rates))


def test_replay_puts_stored_pages() -> None:
    trace = [TraceRequest(0, 0, 0, (1, 2), stored=True), TraceRequest(0, 0, 0, (1, 2, 3))]
    report = replay(cast(Client, FakeStore()), trace, replay_namespace(PAGE_NBYTES))
    assert (report.requests, report.pages_asked, report.pages_hit, report.pages_stored) == (
        1,
        3,
        2,
        3,
    )


@pytest.mark.parametrize("position", [0, 137, PAGE_NBYTES - 1])
def test_one_wrong_byte_is_a_mismatch(position: int) -> None:
    store = FakeStore()
    store.flip = (trace_prefix_hash(2), position)
    trace = [TraceRequest(0, 0, 0, (1, 2, 3))] * 2
    report = replay(cast(Client, store), trace, replay_namespace(PAGE_NBYTES))
    assert (report.pages_hit, report.mismatches, report.verified_nbytes) == (3, 1, 2 * PAGE_NBYTES)


def test_read_without_bytes_is_a_mismatch_despite_old_bytes() -> None:
    store = FakeStore()
    trace = [TraceRequest(0, 0, 0, (1, 2))] * 2
    namespace = replay_namespace(PAGE_NBYTES)

    def stop_reading(report: ReplayReport) -> None:
        store.untouched = trace_prefix_hash(1) if report.requests == 2 else None

    assert (
        replay(
            cast(Client, store), [*trace, trace[0]], namespace, on_progress=stop_reading
        ).mismatches
        == 1
    )


def test_page_evicted_between_lookup_and_get_counts_as_lost() -> None:
    store = FakeStore()
    store.vanished = trace_prefix_hash(2)
    report = replay(
        cast(Client, store), [TraceRequest(0, 0, 0, (1, 2, 3))] * 2, replay_namespace(PAGE_NBYTES)
    )
    assert (report.pages_hit, report.pages_lost, report.mismatches) == (1, 2, 0)


def test_puts_to_a_full_node_are_counted() -> None:
    store = FakeStore()
    store.full = True
    report = replay(
        cast(Client, store), [TraceRequest(0, 0, 0, (1, 2, 3))], replay_namespace(PAGE_NBYTES)
    )
    assert (report.pages_full, report.pages_stored) == (3, 0)


def test_request_without_pages_is_counted() -> None:
    report = replay(
        cast(Client, FakeStore()), [TraceRequest(0, 0, 0, ())], replay_namespace(PAGE_NBYTES)
    )
    assert (report.requests, report.pages_asked, report.prefix_hit_rate) == (1, 0, 0.0)


def test_speed_scales_the_times_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("kvstore.tools.replay.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("kvstore.tools.replay.time.sleep", sleep)
    seen: dict[int, float] = {}
    trace = [TraceRequest(timestamp_ms, 0, 0, (1,)) for timestamp_ms in (0, 1000, 1000, 5000)]
    replay(
        cast(Client, FakeStore()),
        trace,
        replay_namespace(PAGE_NBYTES),
        speed=2.0,
        on_progress=lambda report: seen.__setitem__(report.requests, now[0] - 100.0),
    )
    # The last report before request n+1 is made while waiting for it, so it shows its due time
    assert seen == pytest.approx({1: 0.5, 2: 0.5, 3: 2.5, 4: 2.5})


def test_each_replay_has_its_own_namespace() -> None:
    assert replay_namespace(64).digest != replay_namespace(64).digest


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="page size 0"):
        replay_namespace(0)
    with pytest.raises(InvalidRequest, match="capacity 0"):
        throwaway_node(0, 4096)
