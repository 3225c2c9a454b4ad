"""Quotas of the disk: a tenant over its quota loses its own pages, never those of a tenant within
its quota.
"""

import random
import time
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore.errors import Exhausted
from node.auth.quotas import Quota
from node.disk.page_table import PageTable
from node.memory.tenant_usage import Limits

PAGE = 4096
QUIET, LOUD, FREE = 1, 2, 3
NAMES = {QUIET: "quiet", LOUD: "loud", FREE: "free"}


class Shelf:
    """A page table with three tenants of one namespace each, named by the namespace's number."""

    def __init__(self, pages: int, block_pages: int = 16) -> None:
        self.records = PageTable(pages * PAGE, block_pages * PAGE)
        self.accounts = {number: self.records.accounts.of(name) for number, name in NAMES.items()}
        self.records.account_of = self.accounts.__getitem__
        self.now_s = 100

    def limit(self, **quotas: int) -> None:
        limits = {name: Limits(count * PAGE) for name, count in quotas.items()}
        self.records.accounts.set_limits(
            lambda name: limits.get(name, Limits()), sum(quotas.values()) * PAGE
        )
        for used_s, record in self.records.strays(1, self.records.number_end):
            self.records.regroup(record, used_s)

    def put(self, number: int, *names: int, nbytes: int = PAGE) -> bool:
        """Store the pages one after the other; return whether there was room for all."""
        for name in names:
            self.now_s += 1
            while not (record := self.records.reserve(number, key(name), nbytes)):
                victims = self.records.victims(number, nbytes, self.now_s)
                if not victims:
                    return False
                for victim in victims:
                    self.records.remove(victim)
            self.records.publish(record, bytes(16), self.now_s)
        return True

    def present(self, number: int, *names: int) -> list[int]:
        return [name for name in names if self.records.find(number, key(name))]


def key(name: int) -> bytes:
    return name.to_bytes(16, "big")


def test_tenant_at_its_quota_loses_its_own_oldest_pages() -> None:
    shelf = Shelf(64)
    shelf.limit(quiet=32, loud=32)
    shelf.put(QUIET, *range(32))
    shelf.put(LOUD, *range(300))
    assert shelf.present(QUIET, *range(32)) == [*range(32)]
    assert shelf.present(LOUD, *range(300)) == [*range(268, 300)]
    assert shelf.records.check() == []


def test_tenant_without_quota_uses_the_space_that_others_leave() -> None:
    shelf = Shelf(64)
    shelf.limit(quiet=32)
    shelf.put(QUIET, *range(16))
    shelf.put(FREE, *range(200))
    assert shelf.present(QUIET, *range(16)) == [*range(16)]
    assert shelf.present(FREE, *range(200)) == [*range(152, 200)]
    shelf.put(QUIET, *range(16, 32))
    assert shelf.present(QUIET, *range(32)) == [*range(32)]
    assert shelf.present(FREE, *range(200)) == [*range(168, 200)]
    assert shelf.records.check() == []


def test_quota_set_or_lowered_later_applies_to_stored_pages() -> None:
    shelf = Shelf(64)
    shelf.put(QUIET, *range(32))
    shelf.put(LOUD, *range(32))
    shelf.limit(loud=8)
    assert shelf.records.check() == []
    shelf.put(QUIET, *range(100, 108))
    assert shelf.present(QUIET, *range(32)) == [*range(32)], (
        "a tenant over its quota loses pages first"
    )
    assert shelf.present(LOUD, *range(32)) == [*range(8, 32)], "the oldest first"
    shelf.limit(loud=8, quiet=40)
    shelf.put(LOUD, 50)
    assert shelf.present(LOUD, *range(60)) == [*range(25, 32), 50], (
        "a new quota keeps the order of last use"
    )
    shelf.limit()
    assert shelf.records.check() == []


def test_page_sizes_of_one_tenant_evict_no_page_of_another() -> None:
    shelf = Shelf(256)
    shelf.limit(quiet=128, loud=128)
    for name in range(128):
        shelf.put(QUIET, name)
        shelf.put(LOUD, name)
    for size in range(2, 17):
        shelf.put(LOUD, *range(1000 * size, 1000 * size + 50), nbytes=size * PAGE)
        assert shelf.accounts[LOUD].nbytes <= 128 * PAGE
    assert shelf.present(QUIET, *range(128)) == [*range(128)]
    assert shelf.records.check() == []


def test_page_larger_than_the_quota_evicts_no_page() -> None:
    shelf = Shelf(64)
    shelf.limit(loud=8)
    shelf.put(LOUD, *range(8))
    assert not shelf.put(LOUD, 100, nbytes=16 * PAGE)
    assert shelf.present(LOUD, *range(8)) == [*range(8)]


def test_disk_quota_counts_pages_of_an_earlier_run() -> None:
    shelf = Shelf(64)
    shelf.limit(loud=8)
    for slot in range(16):
        number = LOUD if slot % 2 else QUIET
        row = (key(slot), (slot * PAGE, PAGE, 0, slot, 0, 0, 0))
        assert not shelf.records.restore(number, [row], 100)
    shelf.records.restored()
    assert [account.nbytes for account in shelf.accounts.values()] == [8 * PAGE, 8 * PAGE, 0]
    shelf.put(LOUD, 100)
    assert shelf.present(LOUD, *range(16)) == [*range(3, 16, 2)]
    assert shelf.records.check() == []


def test_random_load_evicts_no_page_of_a_tenant_within_its_quota(seed: int) -> None:
    rng, shelf = random.Random(seed), Shelf(128)
    quotas = {"quiet": 48, "loud": 64}
    for step in range(1000):
        if step % 100 == 0:
            some = {name: count for name, count in quotas.items() if rng.random() < 0.8}
            shelf.limit(**some)
        number = rng.choice([*NAMES])
        name, nbytes = rng.randrange(200), rng.choice([1, 1, 1, 2, 3]) * PAGE
        record = shelf.records.find(number, key(name))
        before = {n: shelf.present(n, *range(200)) for n in NAMES}
        within = {
            n for n, account in shelf.accounts.items() if account.nbytes_max and not account.is_over
        }
        if not record:
            shelf.put(number, name, nbytes=nbytes)
        elif rng.random() < 0.2:
            shelf.records.remove(record)
            before[number].remove(name)
        elif rng.random() < 0.2:
            try:
                shelf.records.check_pins([record])
            except Exhausted:
                continue
            shelf.records.pin(record, rng.choice([0, shelf.now_s + 50]))
        else:
            shelf.records.touch(record, shelf.now_s)
        for other in within - {number}:
            assert set(before[other]) <= set(shelf.present(other, *range(200))), (
                "a tenant within its quota lost a page to another"
            )
        if step % 20 == 0:
            assert shelf.records.check() == []


@pytest.mark.parametrize("restarted", [False, True])
def test_flood_by_one_tenant_keeps_the_pages_of_another(nodes: Nodes, restarted: bool) -> None:
    quotas = {name: Quota(ram_nbytes=1 << 20, disk_nbytes=2 << 20) for name in ("quiet", "loud")}
    sizes = {"ram_nbytes": 2 << 20, "disk_nbytes": 4 << 20}
    node = nodes.start(**sizes)
    node.quotas.set(quotas)
    client = nodes.connect(node)
    quiet = Pages("m", 16 << 10, tenant="quiet")
    loud = Pages("m", 16 << 10, tenant="loud")
    kept = quiet.keys(*range(120))
    for start in range(0, 120, 20):
        quiet.put(client, kept[start : start + 20])
        client.flush()
    if restarted:
        node = nodes.restart(node, **sizes)
        node.quotas.set(quotas)
        client = nodes.connect(node)
    for start in range(0, 1000, 20):
        loud.put(client, loud.keys(*range(start, start + 20)))
        if start % 200 == 0:
            client.flush()
    client.flush()
    for start in range(0, 120, 20):
        assert quiet.get(client, kept[start : start + 20]) == [True] * 20
    assert node.check() == []
    account = node.disk.records.accounts.of("loud")
    assert 1 << 20 <= account.nbytes <= 2 << 20


def test_waiter_for_a_queue_share_does_not_poll(
    nodes: Nodes, layer: FaultyLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable put that waits for its tenant's share of the disk queue does not poll.

    Half of the queue is reserved for others: the queue has room, but not for this tenant.
    """
    node = nodes.start(ram_nbytes=2 << 20, disk_queue_nbytes=256 << 10)
    node.quotas.set({"loud": Quota(ram_nbytes=1 << 20)})
    client, loud = nodes.connect(node), Pages("m", 16 << 10, tenant="loud")
    asked: list[bytes] = []
    offer, write = node.tier.offer, layer.write

    def slow_write(*arguments: Any) -> int:
        time.sleep(0.1)
        return int(write(*arguments))

    def counted(digest: bytes, hashes: list[bytes]) -> list[bytes]:
        asked.append(digest)
        return list(offer(digest, hashes))

    monkeypatch.setattr(layer, "write", slow_write)
    monkeypatch.setattr(node.tier, "offer", counted)
    loud.put(client, loud.keys(*range(40)), durable=True)
    assert 0 < len(asked) < 50
