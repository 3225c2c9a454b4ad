"""Nodes in the test process, clients of them, and raw connections that can break the protocol."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from known_pages import Pages

from kvstore import Client, ClientConfig, Exhausted, PutOutcome
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from node.server import Node

StartNode = Callable[..., Node]  # keyword arguments are NodeConfig fields
Connect = Callable[..., Client]  # a node, a wire, and ClientConfig fields
ClusterClient = Callable[[Sequence[Node]], Client]
ConnectRaw = Callable[["Node | int"], "Raw"]


def connect(
    where: Node | str, wire: str = "bulk", patience_s: float = 30.0, **settings: Any
) -> Client:
    """Return a client of a node in this process, or of an address.

    Keyword arguments are ClientConfig fields.
    """
    address = f"127.0.0.1:{where.grpc.port}" if isinstance(where, Node) else where
    # A call may take longer than the default of five seconds on a starved machine
    calls_s = settings.get("timeout_s", patience_s)
    patience = {"timeout_s": calls_s, "connect_timeout_s": min(20.0, calls_s)}
    return Client(ClientConfig(**{"address": address, "wire": wire, **patience, **settings}))


@contextlib.contextmanager
def connecting() -> Iterator[Connect]:
    """Yield a function that makes clients; close them at the end."""
    clients: list[Client] = []

    def to(where: Node | str, wire: str = "bulk", **settings: Any) -> Client:
        clients.append(connect(where, wire, **settings))
        return clients[-1]

    yield to
    for client in clients:
        client.close()


def stop_all(nodes: Sequence[Node]) -> None:
    """Stop nodes in parallel, because each takes half a second."""
    stopping = [threading.Thread(target=node.stop) for node in nodes]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()


def leave_cluster(node: Node) -> None:
    """Make a node the only member, so that no pages wait for a member that is down."""
    view = node.membership.view
    if view is not None:
        left = [member for member in view.members if member.id == node.membership.member]
        node.membership.become(
            replace(view, number=view.number + 1000, members=tuple(left), replicas=1)
        )


def settle(node: Node, sessions: int | None = 0) -> None:
    """Wait until no page is read or written and `sessions` sessions are left (None: any number).

    Then check that nothing leaked. Idle bulk connections count as sessions.
    """

    def quiet() -> bool:
        tier = node.tier
        return not (tier.held_count or tier.writing_count) and sessions in (
            None,
            node.sessions.count,
        )

    end = time.monotonic() + 60.0
    while not quiet() and time.monotonic() < end:
        threading.Event().wait(0.01)
    tier = node.tier
    assert quiet(), (
        f"{tier.held_count=} {tier.writing_count=} {node.sessions.count=}, wanted {sessions}"
    )
    assert node.check() == []


class Raw(FrameSocket):
    """A bulk connection that sends arbitrary bytes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        super().__init__(self.sock)
        self.arm(60.0)

    def request(self, **op: Any) -> None:
        self.send_frame(pb.BulkRequest(**op).SerializeToString())

    def reply(self) -> tuple[pb.BulkReply, int]:
        header, payload_nbytes = self.recv_frame(1 << 22)
        return pb.BulkReply.FromString(header), payload_nbytes

    def ask(self, **op: Any) -> pb.BulkReply:
        self.request(**op)
        return self.reply()[0]

    def ending(self) -> pb.Error | None:
        """Return the error that the node sends before it hangs up, or None if it just hangs up."""
        try:
            reply = self.reply()[0]
        except ConnectionError:
            return None
        assert reply.WhichOneof("op") == "error", reply
        with pytest.raises(ConnectionError):
            self.reply()
        return reply.error


class Bystander:
    """A client that makes verified puts and gets while others misbehave.

    `evicting`: the node is too small for all pages, so pages may be missing, but never wrong.
    """

    def __init__(self, node: Node, evicting: bool = False) -> None:
        self._evicting = evicting
        self._pages = Pages("bystander")
        address = f"127.0.0.1:{node.grpc.port}"
        self._client = Client(
            ClientConfig(address, wire="bulk", timeout_s=30.0, connect_timeout_s=20.0)
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.005):
                keys = self._pages.keys(*range(self.rounds, self.rounds + 4))
                try:
                    outcomes = self._pages.put(self._client, keys)
                except Exhausted:
                    outcomes = [PutOutcome.FULL]
                hits = self._pages.get(self._client, keys)
                assert self._evicting or (PutOutcome.FULL not in outcomes and all(hits))
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 -- raised again in the test's thread
            self.error = error

    def __enter__(self) -> "Bystander":
        self._thread.start()
        self._wait_rounds(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._wait_rounds(self.rounds + 2)
        self._stop.set()
        self._thread.join()
        self._client.close()
        if self.error:
            raise self.error
        assert self._client.stats.connects == 1, "the bystander lost its connection"

    def _wait_rounds(self, count: int) -> None:
        end = time.monotonic() + 60.0
        while self.rounds < count and self._thread.is_alive():
            assert time.monotonic() < end, "the bystander is stuck"
            self._stop.wait(0.002)
