"""A start restores rows in runs exactly as it would one by one."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from disk_nodes import Pages

from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from node.disk import io_protocol
from node.disk.index import DiskIndex
from node.disk.io_process import ProcessRows, Timeouts
from node.disk.page_table import BLOCK_COUNT, PageTable
from node.disk.rows import RUN_ROWS, PageRow, namespace_key, page_runs, parse_page_row
from node.slab import SlotAllocator

EXTENT_NBYTES = 1 << 18
EXTENTS = 96
NOW_S = 1_000_000
SIZES = (4096, 4096, 8192, 12288, 20480, 1 << 17)
Pair = tuple[bytes, bytes]


def sound(key: bytes) -> Pair:
    number = int.from_bytes(key[3:], "big")
    row = PageRow(key[2], key[3:], number << 12, 4096, 1, 1, 0, key[3:19])
    return key, row.value()


def keys(count: int, namespace: int = 1, nbytes: int = 16) -> list[bytes]:
    return [
        b"P" + namespace.to_bytes(2, "big") + number.to_bytes(nbytes, "big")
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        [0],
        [0, 1, 2],
        [RUN_ROWS - 1, RUN_ROWS, RUN_ROWS + 1],
        [2 * RUN_ROWS],
        range(RUN_ROWS + 1),
        range(2 * RUN_ROWS + 1),
    ],
)
def test_each_damaged_row_is_in_one_run(bad: Sequence[int]) -> None:
    """Regression: damaged rows before the first intact one were in no run."""
    there = keys(2 * RUN_ROWS + 1)
    damaged = {there[number] for number in bad}
    pairs = [(key, b"damaged") if key in damaged else sound(key) for key in there]
    runs = list(page_runs(pairs))
    assert [key for run in runs for key in run.damaged] == sorted(damaged)
    assert [(b"P\0\1" + found) for run in runs for found in run.hashes] == [
        key for key in there if key not in damaged
    ]


def test_run_of_damaged_rows_is_short() -> None:
    """Regression: one run had all damaged rows, in a message that may be too large to send."""
    runs = list(page_runs((key, b"damaged") for key in keys(3 * RUN_ROWS + 5)))
    assert [len(run.damaged) for run in runs] == [RUN_ROWS] * 3 + [5]


def test_hashes_of_several_lengths_stay_apart() -> None:
    """Regression: hashes of 24, 16 and 32 bytes were kept as three of 24."""
    table, hashes = PageTable(EXTENT_NBYTES, EXTENT_NBYTES), [b"a" * 24, b"b" * 16, b"c" * 32]
    rows = [(found, (at * 4096, 4096, 0, 5, 0, 0, 0)) for at, found in enumerate(hashes)]
    assert not table.restore(1, rows, 100)
    table.restored()
    assert {table.key(record)[1] for record in table.records()} == set(hashes)


def test_pages_beyond_the_end_of_a_smaller_disk_take_no_records() -> None:
    """Regression: a disk of a tenth of its former size took the RAM of the former one."""
    table = PageTable(EXTENT_NBYTES, EXTENT_NBYTES)
    slots = EXTENT_NBYTES // 4096
    offsets = [at * 4096 for at in range(10_000)]
    rows = [(b"%032d" % at, (at, 4096, 0, 5, 0, 0, 0)) for at in reversed(offsets)]
    refused = {
        found
        for at in range(0, len(rows), 100)
        for found in table.restore(1, rows[at : at + 100], 9)
    }
    assert refused == {b"%032d" % at for at in offsets[slots:]}
    table.restored()
    assert table.check() == []
    assert (table.count, table.number_end) == (slots, 1 + BLOCK_COUNT)


def test_run_that_is_cut_off_is_an_error_of_the_disk() -> None:
    """Regression: it was no OSError, so the node did not start, instead of without its disk."""
    run = next(page_runs(map(sound, keys(3))))
    message = io_protocol.pack_run(run._replace(damaged=keys(2)))
    for end in range(1, len(message)):
        stream: Any = SimpleNamespace(stream=lambda *_, end=end: iter([message[:end], b""]))
        directory: Any = SimpleNamespace(process=SimpleNamespace(orders=stream))
        rows = ProcessRows(directory, Timeouts(60.0, lambda: None))
        if len(message) - end == 21:  # without the last key
            assert [len(run.damaged) for run in rows.all_pages()] == [1]
        elif len(message) - end == 42:
            assert [len(run.damaged) for run in rows.all_pages()] == [0]
        else:
            with pytest.raises(OSError, match="an invalid message"):
                list(rows.all_pages())


# ---- comparison with a model -----------------------------------------------------------------


class Model:
    """Restore rows one by one: what is left, and which rows are to be deleted."""

    def __init__(self, known: set[int], empty: frozenset[int], extents: int) -> None:
        self.known, self.empty, self.region_nbytes = known, empty, extents * EXTENT_NBYTES
        self.slots = PageTable(EXTENT_NBYTES, EXTENT_NBYTES).slots
        self.blocks: dict[int, tuple[int, int]] = {}  # unit -> start and slot size of its block
        self.offsets: set[int] = set()
        self.pages: dict[bytes, PageRow] = {}
        self.gone: set[bytes] = set()

    def restore(self, key: bytes, value: bytes) -> None:
        row = parse_page_row(key, value)
        if row is None or not self.is_usable(row) or not self.claim(row.offset, row.slot_nbytes):
            self.gone.add(key)
        else:
            self.pages[key] = row._replace(used_s=min(row.used_s, NOW_S))

    def is_usable(self, row: PageRow) -> bool:
        over = row.expiry_s and (row.expiry_s <= NOW_S or row.stored_s > NOW_S + 10)
        there = row.offset // EXTENT_NBYTES not in self.empty
        return row.namespace in self.known and there and not over

    def claim(self, offset: int, nbytes: int) -> bool:
        if not 4096 <= nbytes <= EXTENT_NBYTES or offset >= self.region_nbytes:
            return False
        unit_nbytes = self.slots.unit_nbytes
        block_nbytes = unit_nbytes << self.slots.level(nbytes)
        start = offset // block_nbytes * block_nbytes
        units = range(start // unit_nbytes, (start + block_nbytes) // unit_nbytes)
        block = (start, nbytes)
        fits = (offset - start) % nbytes == 0 and offset + nbytes <= start + block_nbytes
        if not fits or offset in self.offsets:
            return False
        if any(self.blocks.get(unit, block) != block for unit in units):
            return False
        self.blocks.update(dict.fromkeys(units, block))
        self.offsets.add(offset)
        return True


def spaces(count: int) -> dict[int, Namespace]:
    return {number: Pages(f"model {number}").namespace for number in range(1, count + 1)}


def population(rng: random.Random, slots: SlotAllocator, count: int) -> dict[bytes, bytes]:
    """Return rows of pages: most of them sound, some of them with one fault each."""
    pairs: dict[bytes, bytes] = {}
    mixed = rng.random() < 0.3
    widths = {number: rng.randrange(16, 65) for number in range(1, 6)}
    for _ in range(count):
        namespace, size = rng.randrange(1, 6), rng.choice(SIZES)
        prefix_hash = rng.randbytes(rng.randrange(16, 65) if mixed else widths[namespace])
        offset = slots.allocate(size, 1)
        if offset is None:
            offset = rng.randrange(EXTENTS * EXTENT_NBYTES >> 12) << 12
        stored, used, expiry = NOW_S - 50, NOW_S - rng.randrange(50), 0
        match rng.randrange(20):
            case 0:
                expiry = NOW_S + rng.choice((-1, 0, 1, 100))
            case 1:
                stored, expiry = NOW_S + rng.choice((9, 10, 11)), NOW_S + 99
            case 2:
                used = NOW_S + rng.randrange(1 << 20)
            case 3:
                offset = rng.choice((1 << 44, (1 << 63) + 4096, EXTENTS * EXTENT_NBYTES))
            case 4:
                offset = rng.randrange(EXTENTS * EXTENT_NBYTES)
            case 5:
                size = rng.choice((0, 1, 4095, *SIZES, EXTENT_NBYTES + 4096, 1 << 63))
        checksum, leaves = rng.randbytes(16), rng.randbytes(8 * rng.choice((0, 0, 3)))
        row = PageRow(namespace, prefix_hash, offset, size, stored, used, expiry, checksum, leaves)
        value = row.value()
        pairs[row.key] = value if rng.random() > 0.03 else value[:-1]
    return pairs


def started(
    pairs: dict[bytes, bytes],
    known: dict[int, Namespace],
    empty: frozenset[int],
    extents: int,
) -> DiskIndex:
    """Restore rows as a node does, and let each run pass through a message."""
    index = DiskIndex(PageTable(extents * EXTENT_NBYTES, EXTENT_NBYTES))
    index.empty_extents = empty
    for number, value in known.items():
        assert not index.restore_namespace(number, namespace_message(value).SerializeToString())
    for run in page_runs(sorted(pairs.items())):
        index.restore_pages(io_protocol.unpack_run(io_protocol.pack_run(run)), NOW_S)
    assert index.restored(lambda value, digest: None) == []
    return index


def deleted(index: DiskIndex) -> list[bytes]:
    found: list[bytes] = []
    while index.tombstones.count:
        found += index.tombstones.take()
    return found


def agrees(index: DiskIndex, pages: dict[bytes, PageRow]) -> None:
    records = index.records
    assert records.check() == []
    numbers = {key: records.find(int.from_bytes(key[1:3], "big"), key[3:]) for key in pages}
    assert sorted(numbers.values()) == sorted(records.records()), "each has its own record"
    for key, row in pages.items():
        record = numbers[key]
        assert records.key(record) == (row.namespace, row.prefix_hash)
        assert (records.offset(record), records.checksum(record)) == (row.offset, row.checksum)
        assert (records.used_s(record), records.expiry_s(record)) == (row.used_s, row.expiry_s)
        assert records.slots.block_of(row.offset).kind.slot_nbytes == row.slot_nbytes


def used_on(rng: random.Random, index: DiskIndex, pages: dict[bytes, PageRow]) -> None:
    """Store, remove and evict pages of a restored index, and do the same to the model's."""
    records = index.records
    live = sorted(index.namespace_ids.values)
    for _ in range(300 if live else 0):
        if pages and rng.random() < 0.5:
            key = rng.choice(list(pages))
            del pages[key]
            index.forget(records.find(int.from_bytes(key[1:3], "big"), key[3:]))
            continue
        number, prefix_hash, size = rng.choice(live), rng.randbytes(32), rng.choice(SIZES)
        record = records.reserve(number, prefix_hash, size)
        if not record:
            for victim in records.victims(number, size, NOW_S):
                space, found = records.key(victim)
                del pages[b"P" + space.to_bytes(2, "big") + found]
                index.forget(victim)
            continue
        checksum = rng.randbytes(16)
        records.publish(record, checksum, NOW_S)
        index.namespace_ids.counts[number] += 1
        row = PageRow(number, prefix_hash, records.offset(record), size, NOW_S, NOW_S, 0, checksum)
        pages[row.key] = row


@pytest.mark.parametrize("count", [40, RUN_ROWS, RUN_ROWS + 1, 4096 + 1])
def test_start_restores_as_one_by_one(seed: int, count: int) -> None:
    rng = random.Random(seed * 5 + count)
    slots = PageTable(EXTENTS * EXTENT_NBYTES, EXTENT_NBYTES).slots
    pairs = population(rng, slots, count)
    known = spaces(5)
    del known[rng.randrange(1, 6)]
    extents = rng.choice((EXTENTS, EXTENTS // 2))
    empty = frozenset(rng.sample(range(EXTENTS), rng.choice((0, 0, 3))))
    for _ in range(3):  # starts
        model = Model(set(known), empty, extents)
        for key, value in sorted(pairs.items()):
            model.restore(key, value)
        index = started(pairs, known, empty, extents)
        agrees(index, model.pages)
        gone = deleted(index)
        assert len(gone) == len(set(gone)), "each is deleted once"
        assert {key for key in gone if key.startswith(b"P")} == model.gone
        held = {row.namespace for row in model.pages.values()}
        assert {key for key in gone if key.startswith(b"N")} == {
            namespace_key(number) for number in known if number not in held
        }
        known = {number: known[number] for number in held}
        assert {n: index.namespace_ids.counts[n] for n in known} == {
            n: sum(row.namespace == n for row in model.pages.values()) for n in known
        }
        used_on(rng, index, model.pages)
        agrees(index, model.pages)
        pairs = {key: row.value() for key, row in model.pages.items()}
