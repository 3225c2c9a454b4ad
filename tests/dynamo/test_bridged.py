"""Dynamo's router and frontend, a node and a bridge: what they count, forget and choose."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, of the extra `events`")

import zmq
from known_pages import Pages
from real_dynamo import BLOCK, INSTALLED, KEYS, STORE, TOKENS, WORKER, Bridge, Deployment, wait_for
from restartable_node import RestartableNode
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.keys import prefix_hashes

pytestmark = INSTALLED

ALL = {0, 1, 2, 3, 4, 5}
RANKS = [f"{{hash}}_{rank}_{plane}" for rank in range(2) for plane in "kv"]


@pytest.fixture
def client(store: RestartableNode) -> Iterator[Client]:
    with Client(ClientConfig(store.address, timeout_s=20.0)) as client:
        yield client


def test_router_counts_blocks_that_all_ranks_have(
    dynamo: Deployment, client: Client, bridge: Bridge, events: str
) -> None:
    ranks = [Pages("m", tp_rank=rank, tp_size=2) for rank in range(2)]
    bridge(*(word for name in RANKS for word in ("--object-key", name)))
    dynamo.workers({WORKER: {**STORE, "tp_size": 2, "kv_events_endpoint": events}})
    router = dynamo.router()
    ranks[0].put(client, KEYS)
    ranks[1].put(client, KEYS[:4])
    wait_for(router, {0, 1, 2, 3})
    client.remove(ranks[1].namespace, [KEYS[1]])
    wait_for(router, {0, 2, 3})
    assert router.shared([*TOKENS[: BLOCK + 1], *TOKENS[BLOCK:]]) == {0}, "another prompt"
    ranks[1].put(client, KEYS)
    wait_for(router, ALL)
    client.remove(ranks[0].namespace, KEYS)
    wait_for(router, set())


def test_restarts_of_all_processes(
    dynamo: Deployment, store: RestartableNode, client: Client, bridge: Bridge, events: str
) -> None:
    pages = Pages("m")
    pages.put(client, KEYS, durable=True)
    process = bridge()
    worker = dynamo.workers({WORKER: {**STORE, "kv_events_endpoint": events}})
    router = dynamo.router()
    wait_for(router, ALL)

    process.kill()
    process.wait()
    client.remove(pages.namespace, KEYS[4:])
    assert router.shared(TOKENS) == ALL, "Dynamo keeps what it knows of a bridge that is gone"
    bridge()
    wait_for(router, {0, 1, 2, 3})

    store.end()
    wait_for(router, set())
    store.start()
    wait_for(router, {0, 1, 2, 3})

    router.kill()
    router = dynamo.router()
    wait_for(router, {0, 1, 2, 3})

    worker.kill()
    dynamo.workers({WORKER: {**STORE, "kv_events_endpoint": events}})
    client.remove(pages.namespace, KEYS[:1])
    wait_for(router, {1, 2, 3})


class Relay(threading.Thread):
    """Passes a bridge's stream on, without some batches."""

    def __init__(self, context: Any, source: str) -> None:
        super().__init__(daemon=True)
        self.lose, self.lost = 0, 0
        self._source, self._sink = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
        self._source.connect(source)
        self.port = self._sink.bind_to_random_port("tcp://127.0.0.1")

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._source, self._sink):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    self._pass(socket, socket.recv_multipart())
        except zmq.ContextTerminated:
            self._source.close(linger=0)
            self._sink.close(linger=0)

    def _pass(self, socket: Any, frames: list[bytes]) -> None:
        if socket is self._sink:
            self._source.send_multipart(frames)
        elif self.lose:
            self.lose, self.lost = self.lose - 1, self.lost + 1
        else:
            self._sink.send_multipart(frames)


def test_lost_batches_are_forgotten_and_told_again(
    dynamo: Deployment, client: Client, bridge: Bridge, events: str
) -> None:
    pages = Pages("m")
    pages.put(client, KEYS[:4])
    bridge("--refresh", "5")
    context: Any = zmq.Context()
    relay = Relay(context, events)
    relay.start()
    try:
        address = f"tcp://127.0.0.1:{relay.port}"
        dynamo.workers({WORKER: {**STORE, "kv_events_endpoint": address}})
        router = dynamo.router()
        wait_for(router, {0, 1, 2, 3})
        relay.lose = 1
        client.remove(pages.namespace, [KEYS[1]])
        wait_until(lambda: relay.lost == 1)
        pages.put(client, KEYS[4:5])
        wait_for(router, {0, 2, 3, 4})
        relay.lose = 1
        client.remove(pages.namespace, [KEYS[0]])  # nothing follows but the next snapshot
        wait_for(router, {2, 3, 4})
    finally:
        context.term()
        relay.join()


def test_frontend_counts_hits_of_requests(
    dynamo: Deployment, client: Client, bridge: Bridge, events: str
) -> None:
    Pages("m").put(client, KEYS[:3])
    bridge()
    dynamo.workers({WORKER: STORE})  # the frontend alone knows the bridge
    for _ in range(2):
        frontend = dynamo.frontend(events)
        wait_until(lambda frontend=frontend: frontend.hits(TOKENS) == 3)  # type: ignore[misc]
        assert frontend.hits(" ".join(f"w{token}" for token in TOKENS)) == 3, "as text"
        assert frontend.hits([*TOKENS[:BLOCK], *TOKENS[: 5 * BLOCK]]) == 1
        frontend.kill()


def test_what_is_stored_decides_where_a_request_goes(
    dynamo: Deployment, client: Client, bridge: Bridge, events: str
) -> None:
    """A busy worker that has the prompt gets it, until all workers can load it."""
    tokens = [token % 900 for token in range(100 * BLOCK)]
    bridge()
    for _ in range(2):
        dynamo.workers({WORKER: {**STORE, "kv_events_endpoint": events}})
    router = dynamo.router(router_track_active_blocks=False)
    wait_until(lambda: len(router.ask(component=WORKER, scores=tokens)["workers"]) == 2)
    first = router.ask(component=WORKER, best=tokens, request="a")
    router.ask(component=WORKER, free="a")
    wait_until(lambda: router.ask(component=WORKER, best=tokens) == first)
    more = [*tokens[: 75 * BLOCK], *range(70 * BLOCK)]
    assert router.ask(component=WORKER, best=more, request="b") == first
    assert {router.ask(component=WORKER, best=tokens) for _ in range(20)} == {first}
    Pages("m").put(client, prefix_hashes(tokens, BLOCK))
    wait_until(lambda: len(router.shared(tokens)) == 100)
    (second,) = {router.ask(component=WORKER, best=tokens) for _ in range(20)}
    assert second != first
