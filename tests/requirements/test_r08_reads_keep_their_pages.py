"""R8: a read in progress can not lose its pages to eviction, removal or expiry."""

import socket
import threading
import time

from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket

PAGE = 1 << 20
PAGES = 16


def test_r08_slow_reader_gets_its_bytes_despite_removal_and_eviction(
    start_node: StartNode, connect: Connect
) -> None:
    """A slow reader gets its bytes while its pages are removed and others need their slots.

    16 MiB are more than the socket buffers hold, so the node is still sending at that time.
    """
    node = start_node(
        ram_nbytes=32 << 20, extent_nbytes=4 << 20, batch_nbytes_max=16 << 20, stall_s=60.0
    )
    client = connect(node)
    chain, others = Pages("read", PAGE), Pages("others", PAGE)
    keys = chain.keys(*range(PAGES))
    chain.put(client, keys)
    with socket.create_connection(("127.0.0.1", node.bulk.port)) as sock:
        reader = FrameSocket(sock)
        reader.arm(60.0)
        request = pb.GetRequest(namespace=chain.namespace.digest, prefix_hashes=keys)
        reader.send_frame(pb.BulkRequest(get=request).SerializeToString())
        header, payload_nbytes = reader.recv_frame(1 << 20)
        assert payload_nbytes == PAGES * PAGE
        assert all(pb.BulkReply.FromString(header).get.hits)
        assert node.tier.held_count == PAGES
        client.remove(chain.namespace, keys)
        for number in range(48):
            others.put(client, others.keys(number))
            assert others.get(client, others.keys(number)) == [True]
        assert client.node_status().totals.pages_evicted >= 48 - PAGES
        received = bytearray(payload_nbytes)
        reader.recv_into(memoryview(received))
    for position, key in enumerate(keys):
        assert received[position * PAGE : (position + 1) * PAGE] == chain.content(key)
    while node.tier.held_count:
        threading.Event().wait(0.01)


def test_r08_readers_get_right_bytes_beside_an_evicting_writer(
    start_node: StartNode, connect: Connect, wire: str
) -> None:
    """Each hit of 4 readers has the right bytes while a writer evicts pages with every put.

    The node has room for 64 pages, of which readers hold 48 at most. The writer goes on until there
    were enough hits and evictions to reveal a read that does not hold its pages. A wire with less
    work per page needs more of them.
    """
    wanted = {"shm": 1000, "bulk": 1000, "grpc": 160}[wire]
    node = start_node(ram_nbytes=256 << 10, extent_nbytes=64 << 10)
    client = connect(node, wire)
    chain = Pages("contested")
    client.open(chain.namespace)
    counters = node.tier.namespaces.find(chain.namespace.digest).counters
    stop = threading.Event()
    failures: list[BaseException] = []
    hits = [0] * 4

    def read(number: int) -> None:
        try:
            while not stop.is_set():
                first = number * 20
                hits[number] += sum(chain.get(client, chain.keys(*range(first, first + 12))))
        except BaseException as error:  # noqa: BLE001 -- raised again in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    start, end = 0, time.monotonic() + 60.0
    while (
        (counters.pages_evicted < wanted or sum(hits) <= 100)
        and time.monotonic() < end
        and not failures
    ):
        chain.put(client, chain.keys(*(number % 96 for number in range(start, start + 8))))
        start += 8
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert counters.pages_evicted >= wanted
    assert sum(hits) > 100
    assert client.stats.corrupt_pages == 0
