"""Many random good and bad events against one small node that evicts all the time.

Each byte read is compared with the one of its key. Repeat a run with KVSTORE_SEED=<printed>, and
make a longer one with KVSTORE_STORM_EVENTS=100000.
"""

import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Bystander, Connect, ConnectRaw, StartNode, settle

from kvstore import Client, ClientConfig, Exhausted, KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from node.server import Node

EVENTS = int(os.environ.get("KVSTORE_STORM_EVENTS") or 600)
WORKERS = 4
KEYS = 60  # keys of each namespace: more than fit


class Storm:
    """The random events of one worker.

    Only a failed assertion may raise.
    """

    def __init__(
        self, node: Node, spaces: list[Any], raw: Callable[[], Any], rng: random.Random
    ) -> None:
        self.node = node
        self.spaces = spaces
        self.raw = raw
        self.rng = rng
        address = f"127.0.0.1:{node.grpc.port}"
        self.clients = [
            Client(ClientConfig(address=address, wire=wire)) for wire in ("shm", "bulk", "grpc")
        ]
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        events = (
            self.put,
            self.get,
            self.get_ranges,
            self.lookup,
            self.manage,
            self.wrong,
            self.broken,
            self.gone,
        )
        for _ in range(EVENTS // WORKERS):
            event = self.rng.choices(events, (12, 12, 3, 6, 4, 3, 3, 6))[0]
            event()
            self.done[event.__name__] += 1
        for client in self.clients:
            client.close()

    def batch(self) -> tuple[Client, Any, list[bytes]]:
        space = self.rng.choice(self.spaces)
        start = self.rng.randrange(KEYS)
        keys = space.keys(*range(start, start + self.rng.randint(1, 6)))
        return self.rng.choice(self.clients), space, keys

    def put(self) -> None:
        client, space, keys = self.batch()
        try:
            for outcome in space.put(client, keys):
                self.done[outcome.name] += 1
        except Exhausted:
            self.done["exhausted"] += 1

    def get(self) -> None:
        client, space, keys = self.batch()
        self.done["hits"] += sum(space.get(client, keys))

    def get_ranges(self) -> None:
        client, space, keys = self.batch()
        offset = self.rng.randrange(1, space.nbytes)  # ranges must not overlap
        parts = [(0, 1), (offset, self.rng.randint(1, space.nbytes - offset))]
        buffers = [bytearray(1 + parts[1][1]) for _ in keys]
        ranges = [pb_range(*part) for part in parts]
        for key, hit, buffer in zip(
            keys, client.get_ranges(space.namespace, keys, ranges, buffers), buffers, strict=True
        ):
            content = space.content(key)
            assert not hit or buffer == content[:1] + content[offset : offset + parts[1][1]]

    def lookup(self) -> None:
        client, space, keys = self.batch()
        client.lookup(space.namespace, keys, touch=self.rng.random() < 0.5)

    def manage(self) -> None:
        client, space, keys = self.batch()
        self.rng.choice(
            (
                lambda: client.remove(space.namespace, keys),
                lambda: client.pin(space.namespace, keys, self.rng.choice((0.001, 0.01, 0.05))),
                lambda: client.unpin(space.namespace, keys),
                lambda: client.stat(space.namespace, keys),
                lambda: client.verify(space.namespace, keys),
                lambda: list(client.list_pages(space.namespace, limit=5)),
                client.node_status,
            )
        )()

    def wrong(self) -> None:
        """Send a request that the node refuses."""
        client, space, keys = self.batch()
        with pytest.raises(KVStoreError):
            self.rng.choice(
                (
                    lambda: client.pin(space.namespace, keys, 1e9),
                    lambda: client.get_ranges(
                        space.namespace,
                        keys,
                        [pb_range(space.nbytes, 1)],
                        [bytearray(1)] * len(keys),
                    ),
                )
            )()

    def broken(self) -> None:
        """Send bytes that are no frames, or frames in the wrong order."""
        connection = self.raw()
        if self.rng.random() < 0.5:
            self.begin_put(connection)
        noise = self.rng.randbytes(self.rng.randint(1, 200))
        kinds = (
            noise,
            pack_fixed(len(noise), 0) + noise,
            pack_fixed(0, self.rng.randrange(1 << 40)) + noise,
        )
        self.hang_up(connection, self.rng.choice(kinds))

    def gone(self) -> None:
        """Close a connection amid a put or a get."""
        connection = self.raw()
        if self.rng.random() < 0.5:
            wanted = self.begin_put(connection)
            sent = self.rng.choice((0, wanted // 2, wanted))
            self.hang_up(connection, pack_fixed(0, wanted) + bytes(sent) if wanted else b"")
        else:
            _, space, keys = self.batch()
            connection.request(
                get=pb.GetRequest(namespace=space.namespace.digest, prefix_hashes=keys)
            )
            self.hang_up(connection, b"")

    def begin_put(self, connection: Any) -> int:
        """Reserve pages; return the number of bytes that the node waits for."""
        _, space, keys = self.batch()
        request = pb.PutRequest(
            namespace=space.namespace.digest, prefix_hashes=keys, page_nbytes=space.nbytes
        )
        return list(connection.ask(put=request).put.verdicts).count(pb.WRITE) * space.nbytes

    def hang_up(self, connection: Any, last: bytes) -> None:
        try:
            connection.send(last)
        except ConnectionError:
            pass  # the node closed first
        if self.rng.random() < 0.3:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def pb_range(offset: int, nbytes: int) -> Any:
    return pb.ByteRange(offset=offset, nbytes=nbytes)


def test_random_good_and_bad_events_cause_no_harm(
    start_node: StartNode,
    raw: ConnectRaw,
    connect: Connect,
    seed: int,
) -> None:
    node = start_node(ram_nbytes=2 << 20, extent_nbytes=256 << 10, sessions_max=4096)
    spaces = [Pages(f"size {nbytes}", nbytes) for nbytes in (4096, 4096 * 3, 20_000, 65_536)]
    opener = connect(node)
    for space in spaces:
        opener.open(space.namespace)
    storms = [
        Storm(node, spaces, lambda: raw(node), random.Random(f"{seed}/{n}")) for n in range(WORKERS)
    ]
    failures: list[BaseException] = []

    def work(storm: Storm) -> None:
        try:
            storm.run()
        except BaseException as error:  # noqa: BLE001 -- raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(storm,)) for storm in storms]
    with Bystander(node, evicting=True):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    done = sum((storm.done for storm in storms), Counter())
    print(done)
    for met in ("STORED", "EXISTS", "hits", "put", "get", "broken", "gone", "wrong", "manage"):
        assert done[met] > 20, done
    assert opener.node_status().totals.pages_evicted > 100
    settle(node, sessions=1)
    for space in spaces:
        keys = space.keys(*range(KEYS + 6))
        present = opener.lookup(space.namespace, keys).present
        assert space.get(opener, keys) == list(present)
