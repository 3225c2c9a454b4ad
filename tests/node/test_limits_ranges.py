"""The cost of a get with ranges: the bytes hashed for it are limited, and hashed once each."""

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import InvalidRequest, Unavailable
from kvstore.checksum import leaves
from kvstore.config import GET_PIECES_MAX, GET_RANGES_MAX
from kvstore.layout import ByteRange
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.memory.inventory import Inventory
from node.server import Node

WIRES = ["shm", "bulk", "grpc"]
PART = 1 << 20


def ranged(pages: Pages, *numbers: int) -> pb.GetRequest:
    """Return a get request of one byte of each MiB of some pages."""
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(*numbers))
    request.ranges.extend(
        [pb.ByteRange(offset=offset, nbytes=1) for offset in range(0, pages.nbytes, PART)]
    )
    return request


@pytest.fixture(scope="module")
def large_node(start_node: StartNode) -> Node:
    return start_node(extent_nbytes=3 << 20, ram_nbytes=18 << 20, batch_nbytes_max=6 << 20)


@pytest.fixture
def large_pages(large_node: Node, connect: Connect) -> Pages:
    """Store three pages; the largest batch has two."""
    pages = Pages("large", 3 << 20)
    pages.put(connect(large_node), pages.keys(0, 1, 2))
    return pages


@pytest.mark.parametrize("wire", WIRES)
def test_get_of_ranges_limits_hashed_bytes_and_client_splits_it(
    large_node: Node, large_pages: Pages, connect: Connect, wire: str
) -> None:
    """Regression: 19 KB of keys and ranges made the node hash 64 GiB."""
    with (
        large_node.sessions.open(Caller("test")) as session,
        pytest.raises(InvalidRequest, match=r"checks 9437184 bytes.*6291456"),
    ):
        large_node.service.begin_get(session, ranged(large_pages, 0, 1, 2))
    buffers = [bytearray(3) for _ in range(3)]
    ranges = [ByteRange(offset, 1) for offset in range(0, large_pages.nbytes, PART)]
    client = connect(large_node, wire)
    assert (
        client.get_ranges(large_pages.namespace, large_pages.keys(0, 1, 2), ranges, buffers)
        == [True] * 3
    )
    assert buffers == [large_pages.content(key)[::PART] for key in large_pages.keys(0, 1, 2)]


def test_get_of_too_many_pieces_is_refused(large_node: Node, large_pages: Pages) -> None:
    """The node keeps a view for each pair of key and range."""
    request = ranged(large_pages, *[0] * (GET_PIECES_MAX // GET_RANGES_MAX + 1))
    del request.ranges[:]
    request.ranges.extend(
        [pb.ByteRange(offset=offset, nbytes=1) for offset in range(GET_RANGES_MAX)]
    )
    with large_node.sessions.open(Caller("test")) as session:
        with pytest.raises(InvalidRequest, match=f"more than {GET_PIECES_MAX} pieces"):
            large_node.service.begin_get(session, request)
        del request.prefix_hashes[-1]
        assert large_node.service.begin_get(session, request)[0] == GET_PIECES_MAX


def test_repeated_page_is_hashed_once_per_get(
    large_node: Node, large_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = large_node.service
    intact, hashed = service.content.intact, []
    monkeypatch.setattr(
        service.content, "intact", lambda page, ranges: hashed.append(page) or intact(page, ranges)
    )
    with large_node.sessions.open(Caller("test")) as session:
        nbytes, reply, pieces = service.begin_get(session, ranged(large_pages, *[0, 1] * 500))
        assert list(reply.hits) == [True] * 1000
        assert (nbytes, sum(piece.nbytes for piece in pieces), len(reply.checksums)) == (
            3000,
            3000,
            1000,
        )
    assert len(hashed) == 2


def test_cancelled_reader_stops_the_hashing(
    large_node: Node, large_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = large_node.service
    intact, hashed = service.content.intact, []
    monkeypatch.setattr(
        service.content, "intact", lambda page, ranges: hashed.append(page) or intact(page, ranges)
    )
    with large_node.sessions.open(Caller("test", lambda: bool(hashed))) as session:
        with pytest.raises(Unavailable, match="the caller has left"):
            service.begin_get(session, ranged(large_pages, 0, 1))
        assert not session.held
    assert len(hashed) == 1


def test_range_is_verified_against_the_page_checksum(large_node: Node, connect: Connect) -> None:
    """Leaves damaged in the node's memory prove nothing; damage outside the range causes no
    miss.
    """
    pages = Pages("leaves", 3 << 20)
    client, (key,) = connect(large_node), pages.keys(0)
    pages.put(client, [key])

    def first_byte() -> list[bool]:
        return client.get_ranges(pages.namespace, [key], [ByteRange(0, 1)], [bytearray(1)])

    with Inventory(large_node.tier).inspected(pages.namespace.digest, key) as page:
        assert page is not None
        view = large_node.arena.view(page.offset, pages.nbytes)
        view[PART] ^= 1
        assert first_byte() == [True]
        view[0] ^= 1
        page.leaves = leaves(view)
        assert first_byte() == [False]
        view.release()
    assert client.lookup(pages.namespace, [key]).present == (False,)
