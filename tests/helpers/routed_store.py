"""Routers that read a bridge's sockets, and index its bytes by their own rules."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import zmq
from router_rules import DynamoSharedIndex, LlmdIndex

from kvstore import Client
from kvstore.bridge import publisher as module
from kvstore.bridge.bridge import Bridge
from kvstore.bridge.publisher import Publisher
from kvstore.bridge.wires import MooncakeWire, VllmWire
from kvstore.results import FeedEvent

WAIT_S = 60.0
BLOCK = 4
POOL = "pool:store"
OBJECTS = ("{hash}_0_k", "{hash}_0_v")
SUFFIXES = ("_0_k", "_0_v")


class Subscriber:
    """A SUB socket that reads frames as they are."""

    def __init__(self, context: Any, address: str, topic: bytes = b"") -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)
        self.socket.subscribe(topic)

    def read(self) -> Iterator[tuple[bytes, int, Any]]:
        while self.socket.poll(0):
            topic, number, batch = self.socket.recv_multipart()
            yield topic, int.from_bytes(number, "big"), msgpack.unpackb(batch)


class Llmd(Subscriber):
    """llm-d's subscriber without a replay socket; it knows the hashes of `tokens_of`."""

    def __init__(self, context: Any, address: str, tokens_of: dict[bytes, list[int]]) -> None:
        super().__init__(context, address, b"kv@")
        self.index = LlmdIndex(BLOCK)
        self.lose = 0  # so many of the next batches
        for key, tokens in tokens_of.items():
            stored = {"type": "BlockStored", "block_hashes": [key], "token_ids": tokens}
            self.index.apply("engine", [{**stored, "parent_block_hash": None, "medium": "GPU"}])

    def follow(self) -> None:
        for topic, _, (_, events, _) in self.read():
            if self.lose:
                self.lose -= 1
                continue
            _, pod, _ = topic.decode().split("@")
            self.index.apply(pod, events)

    @property
    def stored(self) -> set[bytes]:
        return self.index.held_by(POOL)


class Dynamo(Subscriber):
    """Dynamo's reader of a shared store."""

    def __init__(self, context: Any, address: str) -> None:
        super().__init__(context, address)
        self.index = DynamoSharedIndex()
        self.lose = 0

    def follow(self) -> None:
        for _, number, (_, events, _) in self.read():
            if self.lose:
                self.lose -= 1
                continue
            self.index.apply(number, events)

    def stored(self, keys: list[bytes]) -> set[bytes]:
        hits = self.index.hits(keys, SUFFIXES)
        return {key for key, hit in zip(keys, hits, strict=True) if hit}


class Bridged:
    """A bridge that is driven by the test, and its routers."""

    def __init__(self, client: Client, model: str, refresh_s: float = 0.0) -> None:
        self.context = zmq.Context()
        self.said: list[str] = []
        self.vllm = Publisher(
            self.context, VllmWire("store", model), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
        )
        self.mooncake = Publisher(
            self.context,
            MooncakeWire("store", model, "default", OBJECTS, "sglang-hicache:{hash}"),
            "tcp://127.0.0.1:*",
            refresh_s=refresh_s,
        )
        self.publishers = [self.vllm, self.mooncake]
        self.routers: list[Llmd | Dynamo] = []
        self.bridge = Bridge(client, model, "default", self.publishers, self._say)
        self.feed: Iterator[FeedEvent] = client.feed(model, idle_s=0.05)

    def _say(self, kind: str, **fields: Any) -> None:
        self.said.append(kind)

    def llmd(self, tokens_of: dict[bytes, list[int]]) -> Llmd:
        self.routers.append(router := Llmd(self.context, self.vllm.addresses[0], tokens_of))
        return router

    def dynamo(self) -> Dynamo:
        self.routers.append(router := Dynamo(self.context, self.mooncake.addresses[0]))
        return router

    def tend(self) -> None:
        self.bridge.tend()
        for router in self.routers:
            router.follow()

    def until(self, holds: Callable[[], bool]) -> None:
        """Take events until this holds."""
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, self.said
            self.bridge.take(next(self.feed))
            self.tend()

    def replayed(self, first: int) -> list[tuple[bytes, int, bytes]]:
        """Ask for batches by the replay socket, as vLLM's readers do."""
        reader = self.context.socket(zmq.DEALER)
        reader.setsockopt(zmq.LINGER, 0)
        reader.connect(self.vllm.addresses[1])
        reader.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[bytes, int, bytes]] = []
        end = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < end:
                self.bridge.tend()
                while reader.poll(10):
                    empty, topic, number, batch = reader.recv_multipart()
                    assert empty == b""
                    if number == module.END:
                        assert (topic, batch) == (b"", b"")
                        return found
                    found.append((topic, int.from_bytes(number, "big"), batch))
            raise AssertionError("no end of the replay")
        finally:
            reader.close()

    def close(self) -> None:
        for router in self.routers:
            router.socket.close()
        for publisher in self.publishers:
            publisher.close()
        self.context.destroy(linger=0)
