"""A node stops waiting for a hanging disk when its caller has cancelled or disconnected."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages
from waiting import wait_until

from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket

WAITS_S = 20.0  # how long a durable put waits if its caller stays
SOON_S = 8.0


def test_cancelled_put_stops_waiting_for_queue_space(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """A durable put larger than the disk queue stops waiting for space when its caller leaves."""
    node = nodes.start(disk_queue_nbytes=64 << 10, flush_s=WAITS_S)
    client, keys = nodes.connect(node), pages.keys(*range(40))
    layer.writing.clear()
    pages.put(client, keys)
    assert layer.waiting.acquire(timeout=60.0)
    durability, left = node.service.durability, threading.Event()
    wait = durability.begin_wait(0, left.is_set)
    with ThreadPoolExecutor(1) as pool:
        offering = pool.submit(durability._offer_all, pages.digest, keys, wait)
        time.sleep(0.3)
        assert not offering.done()
        left.set()
        with pytest.raises(Exhausted, match="the caller has left"):
            offering.result(SOON_S)
    layer.writing.set()


def test_durable_put_stops_waiting_when_its_connection_closes(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start(flush_s=WAITS_S)
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    layer.writing.clear()
    pages.put(client, pages.keys(2))
    assert layer.waiting.acquire(timeout=60.0)
    before = node.sessions.count
    connection = FrameSocket(socket.create_connection(("127.0.0.1", node.bulk.port)))
    connection.arm(5.0)
    put = pb.PutRequest(
        namespace=pages.digest, prefix_hashes=pages.keys(1), page_nbytes=pages.nbytes, durable=True
    )
    connection.send_frame(pb.BulkRequest(put=put).SerializeToString())
    wait_until(lambda: node.sessions.count == before + 1)
    time.sleep(0.5)
    assert node.sessions.count == before + 1
    connection.close()
    wait_until(lambda: node.sessions.count == before, SOON_S)
    layer.writing.set()
