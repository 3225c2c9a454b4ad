"""Pages of a keyed namespace: whatever a node, or a writer without the key, changes is a miss."""

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import OTHER, SECRET, become, forge, key_id, pretender, stored
from known_pages import Pages
from local_nodes import Connect, StartNode, settle
from waiting import PATIENT

from kvstore import (
    ByteRange,
    Client,
    ClientConfig,
    ConfigError,
    InvalidRequest,
    Namespace,
    PutOutcome,
    opaque_layout,
)
from kvstore.aio import Client as AsyncClient
from kvstore.page_hmac import PageHmacs
from kvstore.results import Keep
from node.memory.inventory import Inventory
from node.server import Node

NBYTES = 5 * 256 + 100  # five parts, where leaves are small
SEAL = 5 * 16


@pytest.fixture(autouse=True)
def _small_leaves(small_leaves: None) -> None: ...


@pytest.fixture(params=["shm", "bulk", "grpc"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def keyed(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name, NBYTES, key_id=key_id())


@pytest.fixture
def client(node: Node, connect: Connect, wire: str) -> Client:
    client: Client = connect(node, wire, page_key=SECRET)
    return client


def ranged(client: Client, pages: Pages, keys: list[bytes], *ranges: tuple[int, int]) -> list[bool]:
    """Get the ranges of each page; return the hits, after comparing their bytes."""
    parts = [ByteRange(*part) for part in ranges]
    buffers = [bytearray(sum(part.nbytes for part in parts)) for _ in keys]
    hits = client.get_ranges(pages.namespace, keys, parts, buffers)
    for key, hit, buffer in zip(keys, hits, buffers, strict=True):
        wanted = b"".join(
            pages.content(key)[part.offset : part.offset + part.nbytes] for part in parts
        )
        assert not hit or buffer == wanted, f"wrong bytes under {key.hex()}"
    return hits


def test_pages_come_back_whole_and_in_ranges(
    node: Node, client: Client, keyed: Pages, wire: str
) -> None:
    keys = keyed.keys(*range(4))
    assert keyed.put(client, keys) == [PutOutcome.STORED] * 4
    assert client.wire_name == wire
    assert keyed.put(client, keys) == [PutOutcome.EXISTS] * 4
    assert keyed.get(client, [*keys, keyed.key(9), keys[0]]) == [True] * 4 + [False, True]
    assert ranged(client, keyed, [*keys, keyed.key(9)], (1000, 380), (0, 1), (300, 10)) == [
        True
    ] * 4 + [False]
    assert client.stats.forged_pages == client.stats.corrupt_pages == 0
    for key in keys:
        assert stored(node, keyed, key)[:NBYTES] == keyed.content(key)
        assert len(stored(node, keyed, key)) == NBYTES + SEAL
    ((space, info),) = [
        entry for entry in client.namespaces() if entry[0].model == keyed.namespace.model
    ]
    assert (space, info.page_nbytes) == (keyed.namespace, NBYTES + SEAL)
    assert client.verify(keyed.namespace, keys) == (4, 0, 0)


def in_pieces(data: bytearray | bytes, rng: random.Random) -> list[memoryview]:
    """Cut `data` at random places, which are not the borders of parts."""
    edges = [0, *sorted(rng.sample(range(1, len(data)), 6)), len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(edges)]


def test_pages_in_pieces_have_the_same_seals(
    node: Node, client: Client, keyed: Pages, seed: int
) -> None:
    keys, rng = keyed.keys(*range(4)), random.Random(seed)
    client.put(keyed.namespace, keys, [in_pieces(keyed.content(key), rng) for key in keys])
    assert keyed.get(client, keys) == [True] * 4
    forge(node, keyed, keys[2], flip_last)
    pages = [bytearray(NBYTES) for _ in keys]
    hits = [True, True, False, True]
    assert client.get(keyed.namespace, keys, [in_pieces(page, rng) for page in pages]) == hits
    assert [page == keyed.content(key) for page, key in zip(pages, keys, strict=True)] == hits
    ranges = [ByteRange(1000, 380), ByteRange(0, 300)]
    parts = [bytearray(680) for _ in keys]
    assert (
        client.get_ranges(keyed.namespace, keys, ranges, [in_pieces(part, rng) for part in parts])
        == hits
    )
    for part, key, hit in zip(parts, keys, hits, strict=True):
        assert not hit or part == keyed.content(key)[1000:1380] + keyed.content(key)[:300]


def flip_first(data: bytearray) -> None:
    data[0] ^= 1


def flip_last(data: bytearray) -> None:
    data[NBYTES - 1] ^= 128


def flip_seal(data: bytearray) -> None:
    data[-1] ^= 1


def no_seal(data: bytearray) -> None:
    data[NBYTES:] = bytes(SEAL)


def half_a_seal(data: bytearray) -> None:
    data[NBYTES + SEAL // 2 :] = bytes(SEAL - SEAL // 2)


def zeros(data: bytearray) -> None:
    data[:] = bytes(len(data))


def parts_swapped(data: bytearray) -> None:
    """Swap the first two parts together with their MACs."""
    data[:512] = data[256:512] + data[:256]
    data[NBYTES : NBYTES + 32] = data[NBYTES + 16 : NBYTES + 32] + data[NBYTES : NBYTES + 16]


FORGERIES = [flip_first, flip_last, flip_seal, no_seal, half_a_seal, zeros, parts_swapped]


@pytest.mark.parametrize("change", FORGERIES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("read", ["get", "get_ranges"])
def test_page_changed_by_a_node_is_a_miss_and_can_be_stored_again(
    node: Node, client: Client, keyed: Pages, change: Callable[[bytearray], None], read: str
) -> None:
    keys = keyed.keys(*range(4))
    keyed.put(client, keys)
    forge(node, keyed, keys[1], change)
    hits = (
        keyed.get(client, keys) if read == "get" else ranged(client, keyed, keys, (0, NBYTES - 1))
    )
    assert hits == [True, False, True, True]
    assert (client.stats.forged_pages, client.stats.corrupt_pages) == (1, 0)
    assert client.lookup(keyed.namespace, keys).present == (True, False, True, True)
    assert keyed.put(client, keys)[1] is PutOutcome.STORED
    assert keyed.get(client, keys) == [True] * 4


def test_asyncio_client_verifies_pages_and_reports_bad_ones(node: Node, keyed: Pages) -> None:
    """The asyncio client has its own get and put, which need the key and the report too."""
    keys = keyed.keys(*range(4))
    space, pages = keyed.namespace, [keyed.content(key) for key in keys]

    async def main() -> None:
        config = ClientConfig(
            f"127.0.0.1:{node.grpc.port}", wire="bulk", page_key=SECRET, **PATIENT
        )
        async with AsyncClient(config) as client:

            async def get() -> list[bool]:
                buffers = [bytearray(NBYTES) for _ in keys]
                hits = await client.get(space, keys, buffers)
                assert all(not hit or buffers[i] == pages[i] for i, hit in enumerate(hits))
                part = [bytearray(NBYTES - 1) for _ in keys]
                assert (
                    await client.get_ranges(space, keys, [ByteRange(0, NBYTES - 1)], part) == hits
                )
                return hits

            await client.put(space, keys, pages)
            forge(node, keyed, keys[1], flip_last)
            with Inventory(node.tier).inspected(space.digest, keys[2]) as page:
                assert page is not None
                node.arena.view(page.offset, NBYTES)[7] ^= 1
            assert await get() == [True, False, False, True]
            assert (client.stats.forged_pages, client.stats.corrupt_pages) == (1, 1)
            found = await client.stat(space, keys)
            assert [page.present for page in found] == [True, False, False, True]
            assert await client.put(space, keys[1:3], pages[1:3]) == [PutOutcome.STORED] * 2
            assert await get() == [True] * 4

    asyncio.run(main())


def test_prefix_ends_at_a_forged_page(node: Node, client: Client, keyed: Pages) -> None:
    keys = keyed.keys(*range(4))
    keyed.put(client, keys)
    forge(node, keyed, keys[2], flip_first)
    buffers = [bytearray(NBYTES) for _ in keys]
    assert client.get(keyed.namespace, keys, buffers, prefix=True) == [True, True, False, False]


def test_swapped_pages_are_misses_and_an_older_copy_is_a_hit(
    node: Node, client: Client, keyed: Pages
) -> None:
    keys = keyed.keys(*range(3))
    keyed.put(client, keys)
    first, second, third = (stored(node, keyed, key) for key in keys)
    forge(node, keyed, keys[0], become(second))
    forge(node, keyed, keys[1], become(first))
    client.remove(keyed.namespace, keys[2:])
    keyed.put(client, keys[2:])
    forge(node, keyed, keys[2], become(third))
    assert keyed.get(client, keys) == [False, False, True]
    assert client.stats.forged_pages == 2


def test_page_with_the_seal_of_another_namespace_is_a_miss(
    node: Node, client: Client, keyed: Pages
) -> None:
    """The seal is made with the same secret, for the same prefix hash."""
    other = Pages(keyed.namespace.model, NBYTES, key_id=key_id(), tenant="other")
    (key,) = keyed.keys(1)
    for pages in (keyed, other):
        pages.put(client, [key])
    forge(node, keyed, key, become(stored(node, other, key)))
    assert keyed.get(client, [key]) == [False]
    assert other.get(client, [key]) == [True]


def test_page_of_a_writer_without_the_key_is_a_miss(
    node: Node, client: Client, connect: Connect, keyed: Pages, wire: str
) -> None:
    keys = keyed.keys(1, 2)
    stranger = pretender(connect(node, wire, page_key=OTHER))
    assert keyed.put(stranger, keys) == [PutOutcome.STORED] * 2
    assert keyed.get(stranger, keys) == [True] * 2  # the page is valid to its writer
    assert keyed.put(client, keys) == [PutOutcome.EXISTS] * 2
    assert keyed.get(client, keys) == [False, False]
    assert keyed.put(client, keys) == [PutOutcome.STORED] * 2
    assert keyed.get(client, keys) == [True, True]
    assert keyed.get(stranger, keys) == [False, False]


def test_range_is_checked_by_the_parts_it_covers(node: Node, client: Client, keyed: Pages) -> None:
    (key,) = keyed.keys(1)
    keyed.put(client, [key])

    def change(data: bytearray) -> None:
        data[300] ^= 1

    forge(node, keyed, key, change)
    assert ranged(client, keyed, [key], (0, 256), (512, 100)) == [True]
    assert ranged(client, keyed, [key], (0, 257)) == [False]


def test_bad_ranges_are_refused(client: Client, keyed: Pages) -> None:
    for ranges in ([(0, 0)], [(NBYTES, 1)], [(NBYTES - 1, 2)], [(-5, 10)], [(0, 10), (5, 10)]):
        with pytest.raises(InvalidRequest, match="range"):
            ranged(client, keyed, keyed.keys(1), *ranges)


def test_many_ranges_come_in_several_batches(
    client: Client, keyed: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.calls.SCRATCH_NBYTES", 3 * 512)
    keys = keyed.keys(*range(10))
    keyed.put(client, keys)
    client.remove(keyed.namespace, [keys[4]])
    assert ranged(client, keyed, keys, (200, 100)) == [key != keys[4] for key in keys]


def test_client_without_the_key_cannot_put_or_get(
    node: Node, client: Client, connect: Connect, keyed: Pages, wire: str
) -> None:
    (key,) = keyed.keys(1)
    keyed.put(client, [key])
    for settings, message in (({}, "has none"), ({"page_key": OTHER}, f"has {key_id(OTHER)}")):
        other = connect(node, wire, **settings)
        for call in (
            keyed.put,
            keyed.get,
            lambda client, keys: ranged(client, keyed, keys, (0, 1)),
        ):
            with pytest.raises(
                ConfigError,
                match=f"signed with the key {key_id()}, and this client {message}; set page_key",
            ):
                call(other, [key])
        assert other.lookup(keyed.namespace, [key]).prefix_pages == 1
        assert other.verify(keyed.namespace, [key]) == (1, 0, 0)
    assert keyed.get(client, [key]) == [True]


def test_keyed_and_unkeyed_never_mix(node: Node, client: Client, keyed: Pages) -> None:
    plain = Pages(keyed.namespace.model, NBYTES)
    keys = keyed.keys(1, 2)
    plain.put(client, keys[:1])  # by a client with a key
    keyed.put(client, keys[1:])
    assert plain.get(client, keys) == [True, False]
    assert keyed.get(client, keys) == [False, True]


def test_keyed_pages_are_not_used_in_place(node: Node, connect: Connect, keyed: Pages) -> None:
    client = connect(node, "shm", page_key=SECRET)
    client.open(keyed.namespace)
    assert client.maps_arena
    for opened in (client.open_put, client.open_get):
        with pytest.raises(InvalidRequest, match="keyed"), opened(keyed.namespace, keyed.keys(1)):
            pass


def test_page_changed_after_the_copy_is_checked_as_copied(
    node: Node, connect: Connect, keyed: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that maps the arena may change a page between the copy and the check."""
    client, (key,) = connect(node, "shm", page_key=SECRET), keyed.keys(1)
    keyed.put(client, [key])
    fits = PageHmacs.verify

    def late(*arguments: Any) -> bool:
        forge(node, keyed, key, flip_first)
        return fits(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PageHmacs, "verify", late)
        assert keyed.get(client, [key]) == [True]
    assert keyed.get(client, [key]) == [False]


def test_keyed_pages_are_read_from_disk_whole_and_in_part(
    start_node: StartNode, connect: Connect, keyed: Pages, tmp_path: Path
) -> None:
    """A get reads the page back into RAM, and a range only the parts that it needs."""
    node = start_node(data_dir=str(tmp_path / "data"), disk_nbytes=64 << 20)
    client, keys = connect(node, page_key=SECRET), keyed.keys(1, 2)
    contents = [keyed.content(key) for key in keys]
    client.put(keyed.namespace, keys, contents, Keep(durable=True))
    for read in (lambda: ranged(client, keyed, keys, (256, 10)), lambda: keyed.get(client, keys)):
        evict(node, keyed, keys, settle)
        assert read() == [True, True]
    assert client.stats.corrupt_pages == client.stats.forged_pages == 0


def evict(node: Node, pages: Pages, keys: list[bytes], settle: Any) -> None:
    """Evict the pages from RAM, but not from disk."""
    settle(node, sessions=None)
    with node.tier.lock:
        there = node.tier.namespaces.find(pages.namespace.digest).pages
        for page in [there[key] for key in keys if key in there]:
            node.tier.forget(page, "evicted")


def test_random_forgeries_are_never_hits(node: Node, connect: Connect, seed: int) -> None:
    """Pages, forgeries, reads and wires are random."""
    rng = random.Random(seed)
    clients = [connect(node, wire, page_key=SECRET) for wire in ("shm", "bulk", "grpc")]
    for turn in range(40):
        nbytes = rng.choice([rng.randrange(1, 600), rng.randrange(1, 20_000)])
        pages = Pages(f"random {turn}", nbytes, key_id=key_id())
        keys = pages.keys(*range(rng.randrange(1, 6)))
        writer, reader = rng.choices(clients, k=2)
        pages.put(writer, keys)
        forged = {key for key in keys if rng.random() < 0.4}
        for key in forged:
            change(rng, node, pages, key, keys)
        if rng.random() < 0.5:
            assert pages.get(reader, keys) == [key not in forged for key in keys]
        else:
            start = rng.randrange(nbytes)
            hits = ranged(reader, pages, keys, (start, rng.randrange(1, nbytes - start + 1)))
            assert all(hit for key, hit in zip(keys, hits, strict=True) if key not in forged)
    for client in clients:
        assert client.stats.corrupt_pages == 0


def change(rng: random.Random, node: Node, pages: Pages, key: bytes, keys: list[bytes]) -> None:
    there = bytearray(stored(node, pages, key))
    other = stored(node, pages, rng.choice(keys))
    place = rng.randrange(len(there))
    end = rng.randrange(place, len(there)) + 1
    kinds = [other, bytes(len(there)), there[:place] + rng.randbytes(end - place) + there[end:]]
    made = bytes(rng.choice(kinds))
    if made == there:
        there[place] ^= 1 << rng.randrange(8)
        made = bytes(there)
    forge(node, pages, key, become(made))


def test_page_too_large_with_its_seal_is_refused(
    start_node: StartNode, connect: Connect, node: Node
) -> None:
    client = connect(node, page_key=SECRET)
    space = Namespace("large", opaque_layout(1 << 20), key_id=key_id())  # an extent has 1 MiB
    with pytest.raises(
        InvalidRequest, match=f"has {space.stored_nbytes} bytes, this node takes at most {1 << 20}"
    ):
        client.open(space)
