"""R7: every call returns by its deadline; a hung node costs at most one deadline, then a breaker opens;
the result is to recompute."""

import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import Client, DeadlineExceeded, Unavailable
from kvstore.measure.node_process import NodeProcess

DEADLINE_S = 0.15
SLACK_S = 5.0  # for a busy machine; a call without a deadline would take the default or for ever

CALLS: dict[str, Callable[[Client, Any], Any]] = {
    "lookup": lambda client, chain: client.lookup(chain.namespace, chain.keys(1), timeout_s=DEADLINE_S),
    "put": lambda client, chain: client.put(chain.namespace, chain.keys(2), [bytes(4096)], timeout_s=DEADLINE_S),
    "get": lambda client, chain: client.get(chain.namespace, chain.keys(1), [bytearray(4096)], timeout_s=DEADLINE_S),
    "stat": lambda client, chain: client.stat(chain.namespace, chain.keys(1), timeout_s=DEADLINE_S),
    "remove": lambda client, chain: client.remove(chain.namespace, chain.keys(1), timeout_s=DEADLINE_S),
    "pin": lambda client, chain: client.pin(chain.namespace, chain.keys(1), 1.0, timeout_s=DEADLINE_S),
    "verify": lambda client, chain: client.verify(chain.namespace, chain.keys(1), timeout_s=DEADLINE_S),
    "node_status": lambda client, chain: client.node_status(timeout_s=DEADLINE_S),
}


@pytest.fixture
def hung_address() -> Iterator[str]:
    """A listening socket that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def node_process() -> Iterator[NodeProcess]:
    with NodeProcess("--ram-bytes", "1MiB") as process:
        yield process


@pytest.fixture
def stop(node_process: NodeProcess) -> Iterator[Callable[[], None]]:
    """SIGSTOP: its sockets stay open and accept, nobody answers."""

    def stop() -> None:
        os.kill(node_process.pid, signal.SIGSTOP)
        for task in pathlib.Path(f"/proc/{node_process.pid}/task").iterdir():  # each thread stops by itself
            while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    yield stop
    os.kill(node_process.pid, signal.SIGCONT)


def times_out(call: Callable[[Client, Any], Any], client: Client, chain: Any) -> None:
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        call(client, chain)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S


def refuses_at_once(client: Client, chain: Any) -> None:
    """A deadline of an hour shows that nothing is waited for."""
    with pytest.raises(Unavailable, match="next try in"):
        client.lookup(chain.namespace, chain.keys(1), timeout_s=3600.0)


@pytest.mark.parametrize("op", CALLS)
def test_r07_a_node_that_never_answered(hung_address: str, connect: Any, chain: Any, wire: str, op: str) -> None:
    client = connect(hung_address, wire, timeout_s=60.0, connect_timeout_s=DEADLINE_S)
    times_out(CALLS[op], client, chain)
    refuses_at_once(client, chain)
    assert client.stats.failures == 1


@pytest.mark.parametrize("op", CALLS)
def test_r07_a_node_that_stops_answering(
    node_process: NodeProcess, stop: Callable[[], None], connect: Any, chain: Any, wire: str, op: str
) -> None:
    client = connect(node_process.address, wire, timeout_s=60.0, connect_timeout_s=30.0)
    chain.put(client, chain.keys(1))
    stop()
    times_out(CALLS[op], client, chain)
    refuses_at_once(client, chain)


def test_r07_a_node_that_goes_on_is_used_again(
    node_process: NodeProcess, stop: Callable[[], None], connect: Any, chain: Any, wire: str
) -> None:
    client = connect(node_process.address, wire, backoff_s_max=0.05)
    chain.put(client, chain.keys(1))
    stop()
    times_out(CALLS["get"], client, chain)
    os.kill(node_process.pid, signal.SIGCONT)
    end = time.monotonic() + 10.0
    while True:
        try:
            assert chain.get(client, chain.keys(1)) == [True]
            break
        except (Unavailable, DeadlineExceeded):
            assert time.monotonic() < end, "the breaker stays open"
