"""Contents of a node's disk: rows, files of the data directory, and the node's identity file.

The checksums of rows are not keyed, so anyone with access to the disk can write valid rows. Most
rows here are valid in that sense.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from inside import KEYS, PAGE_NBYTES, SPACE
from scripted import Bites, scratch
from watched import Target

from kvstore import Namespace, opaque_layout
from kvstore.checksum import CHECKSUM_NBYTES, row_checksum
from kvstore.messages import namespace_message
from node.cluster.membership import FILE_NAME, Identity
from node.disk.directory import FileSystem
from node.disk.extents import ExtentFiles
from node.disk.rows import (
    PageRow,
    PageRun,
    format_row,
    namespace_key,
    numbered,
    page_at,
    page_runs,
    parse_page_row,
    stored_extents,
)
from node.disk.tier import DiskTier
from node.memory.lock_slices import StepBudget
from node.memory.page import Namespaces
from node.memory.pools import UseOrder
from node.slab import SlotAllocator

EXTENT_NBYTES, EXTENTS = 64 << 10, 4
NOW_S = 1_000_000
LARGE = Namespace("large", opaque_layout(3 * PAGE_NBYTES))
PAGE_ROW, SPACE_ROW = 1, 2  # steps of an input; any other value is a raw row
_NUMBERS = (8, 8, 4, 4, 4)  # sizes in bytes of offset, slot, stored, used, expiry


class Planted:
    """A data directory with the given rows; its extents are all zeros."""

    extent_nbytes, extent_count, direct = EXTENT_NBYTES, EXTENTS, False

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = dict(sorted(rows.items()))
        self.rows = self.files = self

    def space(self) -> FileSystem:
        return FileSystem(free_nbytes=1 << 40, total_nbytes=1 << 40)

    def _of(self, kind: bytes, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        return (
            (key, value)
            for key, value in self._rows.items()
            if key.startswith(kind) and key >= start
        )

    def namespaces(self) -> Iterator[tuple[int, bytes]]:
        return numbered(self._of(b"N", b""))

    def pages(self, start: bytes = b"P") -> Iterator[tuple[bytes, bytes]]:
        return self._of(b"P", start)

    def all_pages(self) -> Iterator[PageRun]:
        return page_runs(self.pages())

    def page(self, key: bytes) -> PageRow | None:
        return page_at(key, self.pages(key))

    def write(
        self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]
    ) -> None:
        for key in gone:
            self._rows.pop(key, None)

    def read(self, offset: int, view: memoryview) -> bool:
        number, within = divmod(offset, EXTENT_NBYTES)
        assert 0 <= number < EXTENTS, f"a read at {offset}, beyond all extents"
        fits = within + view.nbytes <= EXTENT_NBYTES
        if fits:
            view[:] = bytes(view.nbytes)
        return fits

    def write_all(self, slots: object) -> None: ...

    def sync(self) -> None: ...

    def trial(self) -> None: ...

    def trouble(self) -> str:
        return ""

    def limited(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def revive(self) -> None: ...

    def close(self) -> None: ...


def rows() -> Target:
    """Make a target that starts a disk tier on given rows and makes every call about its pages."""
    arena = memoryview(bytearray(EXTENT_NBYTES))
    first = _rows_of_a_life()[0]

    def once(data: bytes) -> None:
        disk = DiskTier(
            Planted(planted(data)),
            lambda offset, nbytes: arena[offset : offset + nbytes],
            1 << 20,
            _clock,
        )
        spaces = Namespaces(16, EXTENT_NBYTES)
        spaces.account_of = UseOrder(
            SlotAllocator(EXTENT_NBYTES, EXTENT_NBYTES), StepBudget()
        ).accounts.of
        disk.restore(lambda value, digest: spaces.open(value, digest, restored=True))
        assert disk.check() == []
        assert data != first or disk.records.count == 3
        for index in spaces.all():
            hashes = list(disk.list_hashes(index.digest, b"", b""))[:8]
            disk.present(index.digest, hashes)
            disk.pin(index.digest, hashes, 9)
            for prefix_hash in hashes:
                borrowed = disk.reading.borrow_page(index.digest, prefix_hash)
                if borrowed is not None and not disk.reading.verify(borrowed):
                    assert not disk.present(index.digest, [prefix_hash])[0], (
                        "a damaged page was not dropped"
                    )
            disk.remove_namespace(index.digest)
        disk.store([])
        assert disk.check() == []
        assert not disk.stop_reason, disk.stop_reason

    return Target(once, _rows_of_a_life)


def _clock() -> int:
    return NOW_S


def planted(data: bytes) -> dict[bytes, bytes]:
    bites, found = Bites(data), {}
    while bites.left:
        step = bites.number(1)
        if step == PAGE_ROW:
            key = b"P" + bites.number(2).to_bytes(2, "big") + bites.sized(1)
            numbers = b"".join(
                bites.number(nbytes).to_bytes(nbytes, "little") for nbytes in _NUMBERS
            )
            body = (
                numbers + bites.take(CHECKSUM_NBYTES).ljust(CHECKSUM_NBYTES, b"\0") + bites.sized(1)
            )
            found[key] = body + row_checksum(key + body)
        elif step == SPACE_ROW:
            key = b"N" + bites.sized(1)
            found[key] = bites.sized(2)
        else:
            key = bites.sized(1)
            found[key] = bites.sized(1)
        if len(found) > 64:
            break
    return found


def _rows_of_a_life() -> list[bytes]:
    spaces = _space_row(1, SPACE) + _space_row(2, LARGE)
    pages = [
        PageRow(1, KEYS[0], 0, PAGE_NBYTES, 9, NOW_S, 0, bytes(16)),
        PageRow(1, KEYS[1], 8 * PAGE_NBYTES, PAGE_NBYTES, 9, 9, NOW_S + 9, bytes(16)),
        PageRow(2, KEYS[2], EXTENT_NBYTES, 3 * PAGE_NBYTES, 9, 9, 0, bytes(16), bytes(16)),
        PageRow(
            2,
            KEYS[3],
            3 * EXTENT_NBYTES + 3 * PAGE_NBYTES,
            3 * PAGE_NBYTES,
            9,
            9,
            NOW_S - 9,
            bytes(16),
        ),
    ]
    rows = b"".join(map(_page_row, pages))
    raw = (
        b"\0"
        + bytes((len(pages[0].key),))
        + pages[0].key
        + bytes((len(pages[0].value()),))
        + pages[0].value()
    )
    return [
        spaces + rows,
        rows + spaces,
        spaces + raw,
        spaces + spaces.replace(b"\2\0\1", b"\2\0\3"),
    ]


def _space_row(number: int, value: Namespace) -> bytes:
    key, message = namespace_key(number)[1:], namespace_message(value).SerializeToString()
    return bytes((SPACE_ROW, len(key))) + key + len(message).to_bytes(2, "little") + message


def _page_row(row: PageRow) -> bytes:
    numbers = (row.namespace, *row[2:7])
    key = row.namespace.to_bytes(2, "little") + bytes((len(row.prefix_hash),)) + row.prefix_hash
    packed = b"".join(
        n.to_bytes(size, "little") for n, size in zip(numbers[1:], _NUMBERS, strict=True)
    )
    return bytes((PAGE_ROW,)) + key + packed + row.checksum + bytes((len(row.leaves),)) + row.leaves


def row() -> Target:
    """Make a target of single page rows: an accepted row is written back with equal bytes."""

    def once(data: bytes) -> None:
        bites = Bites(data)
        key = bites.sized(1)
        value = bites.take(bites.left)
        found = parse_page_row(key, value)
        assert found is None or (found.key[1:], found.value()[:-8]) == (key[1:], value[:-8])

    def seeds() -> list[bytes]:
        made = PageRow(7, KEYS[0], 4096, 4096, 1, 2, 3, bytes(16), bytes(24))
        return [bytes((len(made.key),)) + made.key + made.value(), b"\3P\0\1" + bytes(60)]

    return Target(once, seeds, nbytes_max=512)


# ---- files -----------------------------------------------------------------------------------


def form() -> Target:
    """Make a target of values of the row with the format version."""

    def once(data: bytes) -> None:
        assert stored_extents(data[1:], EXTENT_NBYTES, keep_own=bool(data[:1] > b"\x7f")) > 0

    return Target(once, lambda: [b"\0" + format_row(EXTENT_NBYTES), b"\xff5 4096", b"\xff4 65536"])


def extents() -> Target:
    """Make a target of names of files in the folder of the extents."""
    directory = scratch()

    def once(data: bytes) -> None:
        name = data.decode(errors="surrogateescape")[:200]
        beside = directory / name
        if name.strip("./") == "" or "/" in name or "\0" in name:
            return
        try:
            beside.touch()
        except OSError:
            return
        try:
            ExtentFiles(directory, EXTENT_NBYTES, 1, lambda offset, nbytes: memoryview(b"")).close()
        finally:
            beside.unlink(missing_ok=True)

    return Target(
        once, lambda: [b"000000", b"000007", b"trial", b"lost+found", "²".encode()], nbytes_max=64
    )


def identity() -> Target:
    """Make a target of contents of the identity file `member.json`."""
    directory = scratch()

    def once(data: bytes) -> None:
        (directory / FILE_NAME).write_bytes(data)
        known = Identity(str(directory), "fleet", "")
        assert known.member
        assert isinstance(known.applied, int)

    def seeds() -> list[bytes]:
        known: dict[str, Any] = {
            "cluster": "fleet",
            "member": "n1",
            "token": "0011223344556677",
            "applied": 12,
        }
        return [
            json.dumps(known).encode(),
            json.dumps(known | {"applied": 1 << 70}).encode(),
            b'{"cluster": "other"}',
            b"[" * 3000,
        ]

    return Target(once, seeds, nbytes_max=4096)


TARGETS = {
    "disk rows": rows,
    "page rows": row,
    "format rows": form,
    "extent names": extents,
    "member.json": identity,
}
