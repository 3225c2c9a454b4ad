"""R7: every call returns by its deadline. A hung node costs at most one deadline; then a circuit
breaker opens, and the caller recomputes.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import stopping
from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from kvstore import Client, DeadlineExceeded, Hint, HintAction, KVStoreError, Unavailable
from kvstore.layout import ByteRange
from kvstore.tools.node_process import NodeProcess

DEADLINE_S = 0.3
PAUSE_S = 600.0  # how long a circuit breaker stays open
PAGE = bytes(4096)


def entering(context: Any) -> None:
    with context:
        pass


# Every method of Client that calls the node: (client, chain, timeout in seconds) -> anything
CALLS: dict[str, Callable[[Client, Any, float], Any]] = {
    "lookup": lambda client, chain, s: client.lookup(chain.namespace, chain.keys(1), timeout_s=s),
    "put": lambda client, chain, s: client.put(chain.namespace, chain.keys(2), [PAGE], timeout_s=s),
    "get": lambda client, chain, s: client.get(
        chain.namespace, chain.keys(1), [bytearray(4096)], timeout_s=s
    ),
    "get_ranges": lambda client, chain, s: client.get_ranges(
        chain.namespace, chain.keys(1), [ByteRange(8, 8)], [bytearray(8)], timeout_s=s
    ),
    "open": lambda client, chain, s: client.open(chain.namespace, timeout_s=s),
    "verify": lambda client, chain, s: client.verify(chain.namespace, chain.keys(1), timeout_s=s),
    "remove": lambda client, chain, s: client.remove(chain.namespace, chain.keys(1), timeout_s=s),
    "pin": lambda client, chain, s: client.pin(chain.namespace, chain.keys(1), 1.0, timeout_s=s),
    "unpin": lambda client, chain, s: client.unpin(chain.namespace, chain.keys(1), timeout_s=s),
    "hint": lambda client, chain, s: client.hint(
        chain.namespace, chain.keys(1), Hint(HintAction.RETAIN, ttl_s=1.0), timeout_s=s
    ),
    "stat": lambda client, chain, s: client.stat(chain.namespace, chain.keys(1), timeout_s=s),
    "list_pages": lambda client, chain, s: list(client.list_pages(chain.namespace)),
    "namespaces": lambda client, chain, s: client.namespaces(timeout_s=s),
    "node_status": lambda client, chain, s: client.node_status(timeout_s=s),
    "statuses": lambda client, chain, s: client.statuses(timeout_s=s),
    "remove_namespace": lambda client, chain, s: client.remove_namespace(
        chain.namespace, timeout_s=s
    ),
    "forget": lambda client, chain, s: client.forget("nobody", timeout_s=s),
    "flush": lambda client, chain, s: client.flush(timeout_s=s),
    "scrub": lambda client, chain, s: client.scrub(timeout_s=s),
    "recover": lambda client, chain, s: client.recover(timeout_s=s),
    "drain": lambda client, chain, s: client.drain(timeout_s=s),
    "forget_member": lambda client, chain, s: client.forget_member("n9", timeout_s=s),
    "sweep": lambda client, chain, s: client.sweep(timeout_s=s),
    "events": lambda client, chain, s: client.events(timeout_s=s),
    "query": lambda client, chain, s: client.query("m", chain.keys(1), timeout_s=s),
    "push_identities": lambda client, chain, s: client.push_identities(b"", timeout_s=s),
    "record": lambda client, chain, s: client.record(0.001, timeout_s=s),
    "batch_pages_max": lambda client, chain, s: client.batch_pages_max(
        chain.namespace, timeout_s=s
    ),
    "open_put": lambda client, chain, s: entering(
        client.open_put(chain.namespace, chain.keys(2), timeout_s=s)
    ),
    "open_get": lambda client, chain, s: entering(
        client.open_get(chain.namespace, chain.keys(1), timeout_s=s)
    ),
}
IN_PLACE = {"open_put", "open_get"}  # need a mapped arena
# Call the node only if the client is not connected or does not know the namespace
LOCAL = {
    "open",
    "batch_pages_max",
}


def settings(op: str) -> dict[str, float]:
    """Return a client's timeouts for a call; list_pages has no timeout and gets a short default."""
    default_s = DEADLINE_S if op == "list_pages" else 60.0
    return {
        "timeout_s": default_s,
        "connect_timeout_s": min(default_s, 30.0),
        "backoff_s_max": PAUSE_S,
    }


def has_put(client: Client, chain: Pages) -> bool:
    """Put a page; return False if a busy machine did not connect within a short timeout."""
    try:
        client.put(chain.namespace, chain.keys(1), [PAGE], timeout_s=30.0)
    except Unavailable:
        return False
    return True


@pytest.fixture
def hung_address() -> Iterator[str]:
    """Yield the address of a listening socket that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def node_process() -> Iterator[NodeProcess]:
    with NodeProcess("--ram-bytes", "1MiB") as process:
        yield process


@pytest.fixture
def unresolved_address(node_process: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a healthy node by a name on which the resolver hangs."""
    system, over = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host == "localhost" and not options.get("flags"):
            over.wait(30.0)
        return system(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield "localhost:" + node_process.address.rpartition(":")[2]
    over.set()


@pytest.fixture
def stop(node_process: NodeProcess) -> Iterator[Callable[[], None]]:
    """Yield a function that suspends the node: its sockets accept connections, but never answer."""

    yield lambda: stopping.stop(node_process.pid)
    os.kill(node_process.pid, signal.SIGCONT)


@pytest.fixture(autouse=True)
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the pause of the breaker, which could end too soon on a busy machine."""
    monkeypatch.setattr("kvstore.transports.channel.PAUSE_S_MIN", PAUSE_S)


def refuses(call: Callable[[], object]) -> bool:
    """Return whether the circuit breaker refuses a call."""
    try:
        call()
    except KVStoreError as error:
        return isinstance(error, Unavailable) and "next try in" in str(error)
    return False


def refuse_at_once(clients: dict[str, Client], chain: Pages) -> None:
    """Check that each client refuses calls at once after its call failed.

    A call is repeated: on a busy machine it may start too late to count as a failure of the node,
    or the client may have seen the node alive while the node prepared the next call.
    """
    for op, client in clients.items():
        refused = partial(CALLS[op], client, chain, DEADLINE_S)
        assert any(refuses(refused) for _ in range(20)), op
        # The deadline is long, but ends the test if the client waits
        with pytest.raises(Unavailable, match="next try in"):
            client.lookup(chain.namespace, chain.keys(1), timeout_s=60.0)


def test_r07_tests_cover_every_call_of_the_client() -> None:
    # `view` does not call the node again after its hello; `feed` tells that a node does not answer
    others = {
        "stats",
        "wire_name",
        "maps_arena",
        "key_id",
        "close",
        "tenant",
        "view",
        "feed",
    }
    assert {name for name in dir(Client) if not name.startswith("_")} == CALLS.keys() | others


@pytest.mark.parametrize(
    "where", ["never answers", "swallows packets", "has a name that is not resolved"]
)
def test_r07_calls_to_an_unreachable_node_return_by_their_deadline(
    hung_address: str,
    swallowing_port: int,
    unresolved_address: str,
    connect: Connect,
    chain: Pages,
    wire: str,
    by_deadline: Callable[..., None],
    where: str,
) -> None:
    address = {
        "never answers": hung_address,
        "swallows packets": f"127.0.0.1:{swallowing_port}",
        "has a name that is not resolved": unresolved_address,
    }[where]
    clients: dict[str, Client] = {}

    def prepare(op: str) -> Callable[[], object]:
        clients[op] = connect(address, wire, **settings(op))
        return lambda: CALLS[op](clients[op], chain, DEADLINE_S)

    by_deadline(CALLS, DEADLINE_S, prepare)
    refuse_at_once(clients, chain)
    assert all(client.stats.failures == 1 for client in clients.values())


def test_r07_calls_to_a_suspended_node_return_by_their_deadline(
    node_process: NodeProcess,
    stop: Callable[[], None],
    connect: Connect,
    chain: Pages,
    wire: str,
    by_deadline: Callable[..., None],
) -> None:
    clients: dict[str, Client] = {}

    def prepare(op: str) -> Callable[[], object]:
        def ready() -> bool:  # with a new client each time: a failure opens its breaker for long
            clients[op] = connect(node_process.address, wire, **settings(op))
            return has_put(clients[op], chain)

        os.kill(node_process.pid, signal.SIGCONT)
        wait_until(ready)
        return lambda: CALLS[op](clients[op], chain, DEADLINE_S)

    by_deadline(
        CALLS.keys() - LOCAL - (IN_PLACE if wire != "shm" else set()), DEADLINE_S, prepare, stop
    )
    refuse_at_once(clients, chain)


def test_r07_close_does_not_wait_for_a_suspended_node(
    node_process: NodeProcess, stop: Callable[[], None], connect: Connect, chain: Pages
) -> None:
    """Closing a client does not wait for a suspended node, nor disturb a call that hangs."""
    clients = [
        connect(node_process.address, wire, timeout_s=60.0) for wire in ("shm", "bulk", "grpc")
    ]
    for client in clients:
        chain.put(client, chain.keys(1))
    stop()

    def call(client: Client) -> None:
        with pytest.raises((DeadlineExceeded, Unavailable)):
            CALLS["get"](client, chain, 8.0)

    calling = [threading.Thread(target=call, args=(client,)) for client in clients]
    closing = [threading.Thread(target=client.close) for client in clients]
    for thread in calling:
        thread.start()
    time.sleep(0.1)
    for thread in closing:
        thread.start()
    end = time.monotonic() + 7.0
    for thread in closing:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in closing)
    for thread in calling:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in calling)


def test_r07_resumed_node_is_used_again(
    node_process: NodeProcess, stop: Callable[[], None], connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(node_process.address, wire, backoff_s_max=0.05)
    chain.put(client, chain.keys(1))
    stop()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        CALLS["get"](client, chain, DEADLINE_S)
    os.kill(node_process.pid, signal.SIGCONT)
    end = time.monotonic() + 60.0
    while True:
        try:
            assert chain.get(client, chain.keys(1)) == [True]
            break
        except (Unavailable, DeadlineExceeded):
            assert time.monotonic() < end, "the breaker stays open"
