"""The shared-memory wire to a node in this process: pages are written and read in its arena."""

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode, settle

from kvstore import ByteRange, Client, DeadlineExceeded, Exhausted, InvalidRequest, PutOutcome
from kvstore.checksum import checksum, key_seed, leaves
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.shm import ShmWire
from node.server import Node

PAGE = 64 << 10


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name, PAGE)


@pytest.fixture
def client(node: Node, connect: Connect) -> Iterator[Client]:
    client = connect(node, "shm")
    yield client
    settle(node, sessions=None)


def sums(pages: Pages, keys: list[bytes]) -> list[bytes]:
    return [checksum(pages.content(key), key_seed(pages.namespace.digest, key)) for key in keys]


def fill(slots: Any, pages: Pages, keys: list[bytes]) -> None:
    for view, key in zip(slots.pages, keys, strict=True):
        view[:] = pages.content(key)


def test_client_on_the_nodes_host_uses_shared_memory_by_default(
    node: Node, connect: Connect, pages: Pages
) -> None:
    client = connect(node, "auto")
    assert (client.wire_name, client.maps_arena) == ("none", False)
    assert pages.put(client, pages.keys(1)) == [PutOutcome.STORED]
    assert (client.wire_name, client.maps_arena) == ("shm", True)
    assert (
        client.batch_pages_max(pages.namespace)
        == client.node_status().limits.batch_nbytes_max // PAGE
    )


def test_pages_are_written_and_read_in_the_arena(node: Node, client: Client, pages: Pages) -> None:
    keys = pages.keys(1, 2, 3)
    with client.open_put(pages.namespace, keys) as slots:
        assert slots.verdicts == [pb.WRITE] * 3
        fill(slots, pages, keys)
        for offset, key in zip(slots.offsets, keys, strict=True):
            assert node.arena.view(offset, PAGE) == pages.content(key)
            assert slots.arena.memory[offset : offset + PAGE] == pages.content(key)
        assert client.lookup(pages.namespace, keys).prefix_pages == 0
        slots.commit([leaves(pages.content(key)) for key in keys])
    assert pages.get(client, keys) == [True] * 3
    with client.open_get(pages.namespace, [*keys, *pages.keys(9)]) as held:
        assert held.hits == [True, True, True, False]
        assert [bytes(view) for view in held.pages] == [pages.content(key) for key in keys]
        assert held.checksums == sums(pages, keys)
        assert node.tier.held_count == 3
        with pytest.raises(TypeError, match="read-only"):
            held.pages[0][0] = 1


def test_views_are_released_with_their_slots(client: Client, pages: Pages) -> None:
    keys = pages.keys(1)
    with client.open_put(pages.namespace, keys) as slots:
        fill(slots, pages, keys)
        slots.commit([leaves(pages.content(key)) for key in keys])
        with pytest.raises(ValueError, match="released"):
            slots.pages[0][0] = 1
        with pytest.raises(InvalidRequest, match="nothing to commit"):
            slots.commit([leaves(pages.content(key)) for key in keys])
    with client.open_put(pages.namespace, pages.keys(2)) as slots:
        pass
    with client.open_get(pages.namespace, keys) as held:
        pass
    for view in (slots.pages[0], held.pages[0]):
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_kept_view_of_a_page_is_reported(client: Client, pages: Pages) -> None:
    keys = pages.keys(1)
    with client.open_put(pages.namespace, keys) as slots:
        fill(slots, pages, keys)
        kept = pickle.PickleBuffer(slots.pages[0])
        with pytest.raises(InvalidRequest, match="still in use"):
            slots.commit([leaves(pages.content(key)) for key in keys])
        kept.release()
    assert client.lookup(pages.namespace, keys).prefix_pages == 0
    pages.put(client, keys)
    with (
        pytest.raises(InvalidRequest, match="still in use"),
        client.open_get(pages.namespace, keys) as held,
    ):
        kept = pickle.PickleBuffer(held.pages[0])
    kept.release()


def test_uncommitted_put_leaves_nothing(client: Client, pages: Pages, node: Node) -> None:
    with client.open_put(pages.namespace, pages.keys(1, 2)) as slots:
        assert len(slots.pages) == 2
        assert node.tier.writing_count == 2
    settle(node, sessions=None)
    with (
        pytest.raises(OSError, match="of the caller"),
        client.open_put(pages.namespace, pages.keys(1, 2)),
    ):
        raise OSError("of the caller")
    settle(node, sessions=None)
    assert client.lookup(pages.namespace, pages.keys(1, 2)).present == (False, False)
    assert pages.put(client, pages.keys(1, 2)) == [PutOutcome.STORED] * 2
    assert client.stats.connects == 1


@pytest.mark.parametrize("wrong", [[], [b"c" * 8], [b"c" * 8] * 3, [b"c" * 7] * 2, [b"c" * 16] * 2])
def test_commit_with_wrong_leaves_stores_nothing(
    client: Client, pages: Pages, wrong: list[bytes]
) -> None:
    keys = pages.keys(1, 2)
    refused = pytest.raises(InvalidRequest, match="for 2 written ones; send 8 bytes")
    with refused, client.open_put(pages.namespace, keys) as slots:
        slots.commit(wrong)
    assert client.lookup(pages.namespace, keys).prefix_pages == 0
    assert pages.put(client, keys) == [PutOutcome.STORED] * 2


def test_contexts_nest_in_one_thread(client: Client, pages: Pages, node: Node) -> None:
    old, new = pages.keys(1, 2), pages.keys(3, 4)
    pages.put(client, old)
    with (
        client.open_get(pages.namespace, old) as held,
        client.open_put(pages.namespace, [*old, *new]) as slots,
    ):
        assert slots.verdicts == [pb.EXISTS, pb.EXISTS, pb.WRITE, pb.WRITE]
        for source, target in zip(held.pages, slots.pages, strict=True):
            target[:] = source
        with client.open_put(pages.namespace, new) as third:
            assert third.verdicts == [pb.BUSY, pb.BUSY]
        slots.commit([leaves(view) for view in held.pages])
    with client.open_get(pages.namespace, new) as held:
        assert [bytes(view) for view in held.pages] == [pages.content(key) for key in old]


def test_contexts_wait_for_connections_until_their_deadline(
    node: Node, connect: Connect, pages: Pages
) -> None:
    client = connect(node, "shm", connections_max=1)
    pages.put(client, pages.keys(1))
    with (
        client.open_get(pages.namespace, pages.keys(1)),
        pytest.raises(Exhausted, match="connections_max"),
    ):
        client.lookup(pages.namespace, pages.keys(1), timeout_s=0.05)
    assert pages.get(client, pages.keys(1)) == [True]


def test_held_pages_survive_stalls_removal_and_eviction(
    start_node: StartNode, connect: Connect
) -> None:
    node = start_node(stall_s=1.5, ram_nbytes=4 << 20)
    client, pages, others = connect(node, "shm"), Pages("held", PAGE), Pages("others", PAGE)
    keys = pages.keys(*range(8))
    pages.put(client, keys)
    with client.open_get(pages.namespace, keys) as held:
        client.remove(pages.namespace, keys)
        for number in range(0, 128, 8):  # twice the arena
            others.put(client, others.keys(*range(number, number + 8)))
        threading.Event().wait(1.7)
        assert [bytes(view) for view in held.pages] == [pages.content(key) for key in keys]
    assert pages.get(client, keys) == [False] * 8


def test_deadline_during_a_write_releases_the_slots(
    client: Client, pages: Pages, node: Node
) -> None:
    client.open(pages.namespace)  # connects
    late = pytest.raises(DeadlineExceeded)
    with late, client.open_put(pages.namespace, pages.keys(1), timeout_s=0.2) as slots:
        threading.Event().wait(0.25)
        slots.commit([b"c" * 16])
    settle(node, sessions=None)
    assert node.shm is not None
    assert node.shm.status().orphan_count == 0


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_other_wires_refuse_mapped_access(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client = connect(node, wire)
    for opened in (client.open_put, client.open_get):
        refused = pytest.raises(InvalidRequest, match=f"the {wire} wire maps no memory")
        with refused, opened(pages.namespace, pages.keys(1)):
            raise AssertionError
    assert not client.maps_arena


def test_damaged_page_is_a_miss_and_is_dropped(node: Node, client: Client, pages: Pages) -> None:
    keys = pages.keys(1, 2)
    pages.put(client, keys)
    with client.open_get(pages.namespace, keys) as held:
        offset = held.offsets[1]
    node.arena.view(offset, PAGE)[100] ^= 1
    buffers = [bytearray(30), bytearray(30)]
    parts = [ByteRange(20, 10), ByteRange(PAGE - 20, 20)]
    assert client.get_ranges(pages.namespace, keys[:1], parts, buffers[:1]) == [True]
    content = pages.content(keys[0])
    assert buffers[0] == content[20:30] + content[-20:]
    assert pages.get(client, keys) == [True, False]
    assert client.lookup(pages.namespace, keys).present == (True, False)
    assert client.stats.corrupt_pages == 1


def test_prefix_ends_at_a_page_found_damaged_by_the_reader(
    node: Node, client: Client, pages: Pages
) -> None:
    keys, buffers = pages.keys(1, 2, 3), [bytearray(PAGE) for _ in range(3)]
    pages.put(client, keys)
    with client.open_get(pages.namespace, keys[1:2]) as held:
        node.arena.view(held.offsets[0], PAGE)[9] ^= 1
    assert client.get(pages.namespace, keys, buffers, prefix=True) == [True, False, False]


def test_status_reports_socket_and_connections(node: Node, client: Client, pages: Pages) -> None:
    with client.open_put(pages.namespace, pages.keys(1)):
        shm = client.node_status().shm
    assert node.shm is not None
    assert (shm.socket, shm.orphan_count, shm.orphan_page_count) == (node.shm.path, 0, 0)
    assert shm.client_count >= 2


def test_connections_leave_no_arena_descriptor_open(client: Client, pages: Pages) -> None:
    """Each connection receives a descriptor, but all share the map of the first."""
    client.open(pages.namespace)
    wire = client._fan_out.nodes.only._connection.wire
    assert isinstance(wire, ShmWire)

    def connected() -> int:
        wire._connect(Deadline(20.0)).close()
        count = 0
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed by another thread
                count += "memfd:kvstore-arena" in os.readlink(path)
        return count

    first = connected()
    assert [connected() for _ in range(20)][
        -1
    ] <= first  # maps of earlier clients may end meanwhile
