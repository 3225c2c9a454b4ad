"""A node in this process whose gateway is a separate process.

Tests end the gateway and check what it leaves behind in the node.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fleets import SMALL
from request_stream import RequestStream
from waiting import wait_until

from kvstore import Client, ClientConfig, KVStoreError, Namespace, PutOutcome, opaque_layout
from kvstore.checksum import leaves
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.auth.access import THE_NODE
from node.config import NodeConfig
from node.server import Node

PAGE_NBYTES = 1 << 20
SPACE = Namespace("gateway", opaque_layout(PAGE_NBYTES))
PATIENT: dict[str, Any] = {"timeout_s": 30.0, "connect_timeout_s": 20.0}


def content(key: bytes) -> bytes:
    return key * (PAGE_NBYTES // len(key))


class Onlooker:
    """A client on another wire that puts and gets continuously."""

    def __init__(self, address: str, wire: str) -> None:
        self._client = Client(ClientConfig(address, wire=wire, **PATIENT))
        self._space = Namespace(f"onlooker {wire}", opaque_layout(4096))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.wrong: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                key = self.rounds.to_bytes(4, "big") * 8
                page, found = key * 128, bytearray(4096)
                outcomes = self._client.put(self._space, [key], [page])
                if outcomes != [PutOutcome.STORED]:
                    self.wrong.append(f"a put answered {outcomes}")
                if self._client.get(self._space, [key], [found]) != [True]:
                    self.wrong.append("a page is missing")
                elif found != page:
                    self.wrong.append("a page has wrong bytes")
                self.rounds += 1
                self._stop.wait(0.1)
        except KVStoreError as error:
            self.wrong.append(repr(error))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


class Store:
    """The node, its gateway's process, and one caller over gRPC."""

    def __init__(self, **settings: Any) -> None:
        # Room for all pages of a test module: eviction clears whole blocks, so it may evict a page
        # that was just put.
        values = {**SMALL, "ram_nbytes": 1 << 30, "stall_s": 60.0, **settings}
        self.node = Node(NodeConfig(**values), gateway_processes=True)
        self.node.start()
        self.address = f"127.0.0.1:{self.node.grpc.port}"
        self._numbers = itertools.count(1)
        self._bulk = Client(ClientConfig(self.address, wire="bulk", **PATIENT))
        self._bulk.open(SPACE)
        self.onlookers: list[Onlooker] = []

    def watch(self) -> None:
        """Start clients that put and get on the other wires."""
        self.onlookers = [Onlooker(self.address, wire) for wire in ("bulk", "shm")]
        wait_until(lambda: all(one.rounds for one in self.onlookers))
        self._sessions = self.node.sessions.count

    def close(self) -> None:
        for onlooker in self.onlookers:
            onlooker.close()
        self._bulk.close()
        self.node.stop()

    # ---- the gateway ---------------------------------------------------------------------

    @property
    def gateway(self) -> pb.GatewayStatus:
        return self.node.grpc.status()[0]

    @property
    def pid(self) -> int:
        return self.gateway.pid

    @property
    def end_count(self) -> int:
        return sum(self.node.grpc.ends.values())

    def limit_memory(self, more_nbytes: int) -> None:
        """Limit gateways that start from now on to this one's memory and `more_nbytes`."""
        wait_until(lambda: self.gateway.rss_nbytes)
        config = copy.copy(self.node.config)
        # Below the minimum of the setting, so it bypasses validation
        object.__setattr__(config, "grpc_memory_nbytes", self.gateway.rss_nbytes + more_nbytes)
        self.node.grpc._config = config

    # ---- a caller ------------------------------------------------------------------------

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(
            self.address, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            yield channel

    def key(self) -> bytes:
        return next(self._numbers).to_bytes(4, "big") * 8

    def put(self, channel: grpc.Channel, key: bytes, frames: RequestStream) -> Any:
        """Start a put call, which announces one page, and return it."""
        request = pb.PutRequest(
            namespace=SPACE.digest, prefix_hashes=[key], page_nbytes=PAGE_NBYTES
        )
        frames.say(pb.PutFrame(begin=request))
        return KVStoreStub(channel).Put(iter(frames), timeout=60.0)  # type: ignore[no-untyped-call]

    def stored(self, count: int) -> list[bytes]:
        keys = [self.key() for _ in range(count)]
        assert (
            self._bulk.put(SPACE, keys, [content(key) for key in keys])
            == [PutOutcome.STORED] * count
        )
        return keys

    def read(self, key: bytes) -> bytes | None:
        """Return the page that the node has under the key, or None."""
        page = bytearray(PAGE_NBYTES)
        return bytes(page) if self._bulk.get(SPACE, [key], [page]) == [True] else None

    @contextlib.contextmanager
    def held_up(
        self, method: str, monkeypatch: pytest.MonkeyPatch, behind: bool = False
    ) -> Iterator[Any]:
        """Block a method of the node's service, called over gRPC, until the context ends.

        The method blocks before its work, or `behind` it. Yields a function that waits until a call
        is blocked.
        """
        entered, go_on = threading.Event(), threading.Event()
        real = getattr(self.node.service, method)

        def wait() -> None:
            entered.set()
            assert go_on.wait(120.0)

        def blocking(session: Any, request: Any, *more: Any) -> Any:
            if session.caller.wire != "grpc":
                return real(session, request, *more)
            if not behind:
                wait()
            answer = real(session, request, *more)
            if behind:
                wait()
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(self.node.service, method, blocking)
            try:
                yield lambda: wait_until(entered.is_set)
            finally:
                go_on.set()

    # ---- invariants ----------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """Return whether nothing is held for callers over gRPC; other wires are between calls."""
        node, calls = self.node, self.node.grpc.calls
        held = (
            node.tier.writing_count,
            node.tier.held_count,
            node.sessions.reserved.used,
            node.service.requests.used,
        )
        budgets = (calls.calls.used, calls.transfers.used, calls.durable.used, calls.loads.used)
        return not any((*held, *budgets)) and node.sessions.count <= self._sessions

    def serves(self) -> None:
        """Wait until the node serves a new gRPC client; check that onlookers saw no error."""
        key, page = self.key(), bytearray(PAGE_NBYTES)

        def served() -> bool:
            config = ClientConfig(self.address, wire="grpc", **PATIENT)
            with contextlib.suppress(KVStoreError), Client(config) as client:
                client.put(SPACE, [key], [content(key)])
                return client.get(SPACE, [key], [page]) == [True]
            return False

        wait_until(served)
        assert page == content(key)
        evicted = self.status().totals.pages_evicted
        assert not evicted, "this store is too small: onlookers may miss evicted pages"
        wrong = [one.wrong for one in self.onlookers]
        # Outside test modules, pytest does not show the compared values
        assert wrong == [[], []], wrong

    def status(self) -> pb.NodeStatusReply:
        reply: pb.NodeStatusReply = self.node.service.call(
            "node_status", pb.NodeStatusRequest(), THE_NODE
        )
        return reply


def committed(key: bytes) -> pb.PutFrame:
    return pb.PutFrame(commit=pb.CommitRequest(leaves=[leaves(content(key))]))


def chunk(data: bytes) -> pb.PutFrame:
    return pb.PutFrame(chunk=pb.PageChunk(data=data))
