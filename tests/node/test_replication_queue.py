"""The queue of pages to replicate to other members, without threads and sockets."""

import random
from dataclasses import dataclass, field

import pytest

from node.cluster import replication_queue
from node.cluster.replication_queue import AckWaiter, Batch, Group, ReplicationQueue

DIGEST = b"d" * 16
LASTING = Group(DIGEST, 0, False)


@dataclass(eq=False)
class Sheet:
    """A fake page."""

    key: bytes
    gone: bool = False


def queue(nbytes_max: int = 1000, nbytes_per_s: int = 0) -> ReplicationQueue[Sheet]:
    return ReplicationQueue(nbytes_max, lambda page: page.gone, nbytes_per_s)


def offered(
    waiting: ReplicationQueue[Sheet],
    *numbers: int,
    to: str = "b",
    now: float = 0.0,
    waiter: AckWaiter | None = None,
) -> list[Sheet]:
    pages = [Sheet(b"%03d" % number) for number in numbers]
    for page in pages:
        waiting.offer(page, page.key, 10, LASTING, to, now, waiter)
    return pages


def keys(batch: Batch[Sheet] | None) -> list[bytes]:
    assert batch is not None
    return [queued.prefix_hash for queued in batch.queued_pages]


def test_pages_are_freed_when_their_last_target_is_done() -> None:
    waiting, waiter = queue(), AckWaiter()
    pages = offered(waiting, 1, 2, to="bc", waiter=waiter)
    first, second = waiting.next(0.0), waiting.next(0.0)
    assert first is not None
    assert second is not None
    assert waiting.next(0.0) is None
    assert {first.target, second.target} == {"b", "c"}
    assert keys(first) == keys(second) == [b"001", b"002"]
    waiting.done(first, keys(first), 0.0)
    assert (waiting.freed, waiter.open_count) == ([], 2)
    waiting.done(second, keys(second), 0.0)
    assert waiting.freed == pages
    assert (waiter.open_count, waiter.lost_count, waiting.nbytes, waiting.page_count) == (
        0,
        0,
        0,
        0,
    )
    assert (waiting.counts.pages_handed, waiting.counts.nbytes_handed) == (4, 40)
    assert waiting.check() == []


def test_batch_has_one_group_and_a_size_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = queue()
    groups = [
        LASTING,
        Group(b"e" * 16, 0, False),
        LASTING._replace(expiry_s=9),
        LASTING._replace(durable=True),
    ]
    for number, group in enumerate([*groups, LASTING]):
        waiting.offer(Sheet(b"%d" % number), b"%d" % number, 10, group, "b", 0.0)
    found = []
    while batch := waiting.next(0.0):
        found.append(keys(batch))
        waiting.done(batch, keys(batch), 0.0)
    assert found == [[b"0", b"4"], [b"1"], [b"2"], [b"3"]]
    monkeypatch.setattr(replication_queue, "BATCH_NBYTES_MAX", 25)
    offered(waiting, 1, 2, 3)
    assert len(keys(waiting.next(0.0))) == 2


def test_full_queue_drops_and_counts_the_oldest_page() -> None:
    waiting, waiter = queue(30), AckWaiter()
    pages = offered(waiting, 1, 2, 3, 4, waiter=waiter)
    assert waiting.freed == pages[:1]
    assert (waiting.counts.pages_dropped, waiter.lost_count, waiting.nbytes) == (1, 1, 30)
    assert keys(waiting.next(0.0)) == [b"002", b"003", b"004"]
    offered(waiting, 5, waiter=waiter)  # pages under way stay, so the new one is dropped
    assert (waiting.counts.pages_dropped, waiter.lost_count, waiting.nbytes) == (2, 2, 30)
    assert waiting.check() == []


def test_dropped_pages_are_missed_until_their_target_knows() -> None:
    waiting = queue(nbytes_max=25)
    offered(waiting, 1, 2, 3, 4, to="bc")
    assert (waiting.missed, waiting.under_replicated) == ({"b": 2, "c": 2}, 4)
    waiting.settle_missed("b")
    waiting.follow("bd")  # c has left, with two pages that it missed and two that wait for it
    assert (waiting.missed_by("b"), waiting.missed_by("c"), waiting.missed_by("d")) == (4, 0, 4)
    assert waiting.under_replicated == 4
    for name in "bd":
        waiting.settle_missed(name)
    assert waiting.under_replicated == 0
    waiting.clear()
    assert waiting.under_replicated == 0


def test_page_larger_than_the_queue_is_sent_alone() -> None:
    waiting = queue(5)
    offered(waiting, 1)
    assert keys(waiting.next(0.0)) == [b"001"]


def test_number_of_queued_pages_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_queue, "PAGES_MAX", 3)
    waiting = queue()
    offered(waiting, *range(10))
    assert waiting.page_count == 3


def test_failing_target_is_paused_longer_and_then_given_up() -> None:
    waiting, waiter, now, pauses = queue(), AckWaiter(), 0.0, []
    (page,) = offered(waiting, 1, waiter=waiter)
    while batch := waiting.next(now):
        waiting.failed(batch, now)
        due = waiting.due(now)
        if due is not None:
            pauses.append(due - now)
            assert waiting.next(due - 0.001) is None
            now = due
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert max(pauses) == pytest.approx(replication_queue.PAUSE_S_MAX)
    assert (
        replication_queue.PATIENCE_S
        <= now
        <= replication_queue.PATIENCE_S + replication_queue.PAUSE_S_MAX
    )
    assert (waiter.lost_count, waiting.freed, waiting.counts.pages_dropped) == (1, [page], 1)


def test_failing_target_does_not_block_others() -> None:
    waiting = queue()
    offered(waiting, 1, to="b")
    batch = waiting.next(0.0)
    assert batch is not None
    waiting.failed(batch, 0.0)
    offered(waiting, 2, to="bc")
    other = waiting.next(0.0)
    assert other is not None
    assert (other.target, keys(other)) == ("c", [b"002"])


def test_hanging_targets_leave_threads_for_others() -> None:
    waiting, hung = queue(), "defgh"
    offered(waiting, 1, to=hung)
    for _ in hung:
        batch = waiting.next(0.0)
        assert batch is not None
        waiting.failed(batch, 0.0)
    tried = [waiting.next(1.0), waiting.next(1.0)]
    assert all(tried)
    assert waiting.next(1.0) is None
    assert waiting.due(1.0) is None, "a failing target is due only after one of two tries ends"
    offered(waiting, 2, to="b", now=1.0)
    other = waiting.next(1.0)
    assert other is not None
    assert other.target == "b"
    assert tried[0] is not None
    waiting.failed(tried[0], 1.0)
    again = waiting.next(1.0)
    assert again is not None
    assert again.target in hung


def test_pages_refused_by_a_full_target_are_retried() -> None:
    waiting = queue()
    offered(waiting, 1, 2)
    batch = waiting.next(0.0)
    assert batch is not None
    waiting.done(batch, [b"001"], 0.0)
    assert waiting.next(0.0) is None
    assert keys(waiting.next(replication_queue.PAUSE_S_MIN)) == [b"002"]


def test_page_refused_repeatedly_is_dropped() -> None:
    waiting, now = queue(), 0.0
    offered(waiting, 1)
    for _ in range(replication_queue.REFUSALS_MAX):
        batch = waiting.next(now)
        assert batch is not None
        waiting.failed(batch, now, refused=True)
        now += replication_queue.PAUSE_S_MAX
    assert waiting.next(now) is None
    assert (waiting.counts.pages_dropped, waiting.page_count) == (1, 0)


def test_former_member_gets_no_pages() -> None:
    waiting, waiter = queue(), AckWaiter()
    (first,) = offered(waiting, 1, to="b", waiter=waiter)
    under_way = waiting.next(0.0)
    assert under_way is not None
    (other, both) = offered(waiting, 2, to="b", waiter=waiter) + offered(
        waiting, 3, to="bc", waiter=waiter
    )
    waiting.follow({"c"})
    assert waiting.freed == [other]  # the first may still be under way
    assert (waiter.open_count, waiter.lost_count, waiting.counts.pages_dropped) == (1, 3, 3)
    waiting.failed(under_way, 0.0)
    assert waiting.freed == [other, first]
    assert keys(waiting.next(0.0)) == [both.key]
    assert waiting.check() == []


def test_removed_page_is_not_sent() -> None:
    waiting, waiter = queue(), AckWaiter()
    gone, there = offered(waiting, 1, 2, waiter=waiter)
    gone.gone = True
    assert keys(waiting.next(0.0)) == [there.key]
    assert (waiting.freed, waiter.lost_count, waiting.counts.pages_dropped) == ([gone], 1, 0)


@pytest.mark.parametrize("answered", [True, False])
def test_page_removed_under_way_is_freed(answered: bool) -> None:
    waiting, waiter = queue(), AckWaiter()
    page, other = offered(waiting, 1, 2, waiter=waiter)
    batch = waiting.next(0.0)
    assert batch is not None
    page.gone = True
    (again,) = offered(waiting, 1)
    waiting.done(batch, [], 0.0) if answered else waiting.failed(batch, 0.0)
    assert (waiting.freed, waiter.lost_count, waiting.counts.pages_dropped) == ([page], 1, 0)
    assert sorted(keys(waiting.next(1.0))) == [again.key, other.key]


def test_queue_keeps_its_rate_limit() -> None:
    waiting, now = queue(nbytes_per_s=5), 0.0
    offered(waiting, 1, 2, 3)
    batch = waiting.next(now)
    assert batch is not None
    assert len(batch.queued_pages) == 3
    waiting.done(batch, keys(batch), now)
    offered(waiting, 4)
    assert (waiting.next(5.9), waiting.due(0.0)) == (None, 6.0)
    assert keys(waiting.next(6.0)) == [b"004"]


@dataclass(eq=False)
class Sent:
    """A batch under way.

    `writing` has the keys that its target is about to store, or is None before the target was
    asked.
    """

    batch: Batch[Sheet]
    writing: set[bytes] | None = None
    checked: bool = False
    committed: bool = False


@dataclass
class Fleet:
    """A queue with simulated targets, and the pages that they may have."""

    random: random.Random
    now: float = 0.0
    pages: dict[bytes, Sheet] = field(default_factory=dict)
    all: list[Sheet] = field(default_factory=list)
    has: dict[str, set[bytes]] = field(
        default_factory=lambda: {name: set[bytes]() for name in "bcd"}
    )
    under_way: list[Sent] = field(default_factory=list)
    late: list[Sent] = field(default_factory=list)  # failed here, but may still be committed there
    tickets: list[AckWaiter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = queue(200)

    def put(self) -> None:
        key = b"%02d" % self.random.randrange(30)
        page = self.pages.get(key)
        if page is None:
            page = self.pages[key] = Sheet(key)
        self.all.append(page)
        waiter = AckWaiter()
        self.tickets.append(waiter)
        to = self.random.sample("bcd", self.random.randrange(1, 4))
        self.waiting.offer(page, key, 10, LASTING, to, self.now, waiter)

    def remove(self) -> None:
        """Remove a page as a client does: at all members, in any order, twice."""
        key = b"%02d" % self.random.randrange(30)
        self._remove_everywhere(key)
        self.arrive()
        page = self.pages.pop(key, None)
        if page is not None:
            page.gone = True
        self.arrive()
        self._remove_everywhere(key)

    def _remove_everywhere(self, key: bytes) -> None:
        for keys_there in [
            *self.has.values(),
            *(some.writing for some in self.under_way + self.late if some.writing),
        ]:
            keys_there.discard(key)

    def take(self) -> None:
        batch = self.waiting.next(self.now)
        if batch is not None:
            self.under_way.append(Sent(batch))

    def arrive(self) -> None:
        for sent in self.under_way + self.late:
            if self.random.random() < 0.5:
                self._further(sent)

    def _further(self, sent: Sent) -> None:
        """Take the next step of a transfer: reserve slots, check for removals, or commit."""
        if sent.writing is None:
            sent.writing = set(keys(sent.batch))
        elif not sent.checked and not any(queued.page.gone for queued in sent.batch.queued_pages):
            sent.checked = True
        elif sent.checked and not sent.committed:
            sent.committed = True
            self.has[sent.batch.target] |= sent.writing

    def end(self, healthy: bool = False) -> None:
        if not self.under_way:
            return
        sent = self.under_way.pop(self.random.randrange(len(self.under_way)))
        if healthy:
            for _ in range(3):
                self._further(sent)
        if sent.committed and (healthy or self.random.random() < 0.6):
            self.waiting.done(sent.batch, keys(sent.batch), self.now)
        elif sent.checked and not sent.committed:
            self.waiting.failed(sent.batch, self.now)
            self.late.append(sent)
        elif sent.committed or self.random.random() < 0.5:
            self.waiting.failed(sent.batch, self.now, refused=sent.writing is None)
        else:
            self.waiting.done(sent.batch, [], self.now)

    def wait(self) -> None:
        self.now += self.random.random()

    def change(self) -> None:
        """Change the view in one of 50 steps."""
        if self.random.random() < 0.02:
            self.waiting.follow(set(self.random.sample("bcd", self.random.randrange(4))))


@pytest.mark.parametrize(
    "seed",
    [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 30))],
)
def test_random_steps_keep_the_queue_consistent(seed: int) -> None:
    fleet = Fleet(random.Random(seed))
    for _ in range(1500):
        step = fleet.random.choice(
            [
                fleet.put,
                fleet.put,
                fleet.remove,
                fleet.take,
                fleet.arrive,
                fleet.end,
                fleet.wait,
                fleet.change,
            ]
        )
        step()
        assert fleet.waiting.check() == []
        assert fleet.waiting.nbytes <= 200
    while fleet.waiting.page_count or fleet.waiting.due(fleet.now) is not None or fleet.under_way:
        fleet.now = max(fleet.now, fleet.waiting.due(fleet.now) or 0.0)
        fleet.take()
        fleet.end(healthy=True)
    assert sorted(map(id, fleet.waiting.freed)) == sorted(map(id, fleet.all)), (
        "each hold must be released once"
    )
    assert [waiter.open_count for waiter in fleet.tickets] == [0] * len(fleet.tickets)
    while any(sent.checked and not sent.committed for sent in fleet.late):
        fleet.arrive()
    for name, there in fleet.has.items():
        assert there <= fleet.pages.keys(), f"{name} has pages that were removed, with seed {seed}"
    assert fleet.waiting.counts.pages_handed > 0


def test_page_removed_while_it_is_sent_is_not_acknowledged() -> None:
    waiting, waiter = queue(), AckWaiter()
    (page,) = offered(waiting, 1, waiter=waiter)
    batch = waiting.next(0.0)
    page.gone = True
    assert batch is not None
    waiting.done(batch, keys(batch), 0.0)
    assert (waiter.open_count, waiter.lost_count, waiting.freed) == (0, 1, [page])
