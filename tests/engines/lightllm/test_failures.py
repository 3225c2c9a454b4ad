"""Whatever the store does, requests go on, page references do not leak, and no byte is wrong."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import stop

from gpu_agent.engines.lightllm import PyState
from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

Make = Callable[..., Any]
POISON = 0xA5
# Slack for a busy machine; without a deadline none of these calls would ever return.
SLACK_S = 8.0


@contextlib.contextmanager
def hung(node: NodeProcess) -> Iterator[None]:
    stop(node.pid)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK_S


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the default deadlines of lookup and load, and a short one for saves."""
    for kind, seconds in (("LOOKUP", "0.5"), ("LOAD", "1"), ("SAVE", "2")):
        monkeypatch.setenv(f"KVSTORE_AGENT_{kind}_TIMEOUT_S", seconds)


def keys(hashes: list[int]) -> list[bytes]:
    return [value.to_bytes(16, "big") for value in hashes]


@pytest.fixture
def pair(
    start_node: Make, make_server: Make, monkeypatch: pytest.MonkeyPatch
) -> tuple[NodeProcess, Any, list[int]]:
    """Return a node with a stored prompt of six pages, a server and the prompt's hashes.

    The server has the first two pages of the prompt in memory.
    """
    node = start_node()
    first = make_server(node.address)
    hashes = first.hashes(1, 6)
    first.compute(hashes)
    first.persist()
    hasten(monkeypatch)
    second = make_server(node.address)
    second.compute(hashes[:2])
    second.persist()
    assert second.references() == 0
    return node, second, hashes


@pytest.mark.parametrize("fate", ["killed", "hung"])
def test_request_continues_without_the_store(
    pair: tuple[NodeProcess, Any, list[int]], fate: str
) -> None:
    """R7: a dead store costs a request at most the lookup deadline of 0.5 s."""
    node, server, hashes = pair
    with hung(node) if fate == "hung" else contextlib.nullcontext():
        if fate == "killed":
            node.kill()
        for _ in range(3):
            with within(2.0):
                given = server.match(hashes)
            assert (len(given), server.loaded_tokens) == (2, 0)
            server.release(given)
        assert server.references() == 0


@pytest.mark.parametrize("fate", ["killed", "hung", "forgets"])
def test_page_lost_between_lookup_and_load_discards_the_load(
    pair: tuple[NodeProcess, Any, list[int]], fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole load is discarded, and the request gets only the pages that were in memory."""
    node, server, hashes = pair
    with contextlib.ExitStack() as until_the_end:
        allocate = server.client.allocate_pages

        def and_then(**arguments: Any) -> Any:
            if fate == "killed":
                node.kill()
            elif fate == "hung":
                until_the_end.enter_context(hung(node))
            else:
                with Client(ClientConfig(address=node.address)) as client:
                    assert client.remove(server.service.namespace, keys(hashes[4:5])) == [True]
            result = allocate(**arguments)
            server.memory[result[0]] = POISON
            return result

        monkeypatch.setattr(server.client, "allocate_pages", and_then)
        with within(4.0):
            given = server.match(hashes)
        assert (len(given), server.loaded_tokens) == (2, 0)
        assert server.references() == 2
        server.release(given)
        assert server.references() == 0
        assert server.locked(server.client.query_one_page, hash_key=hashes[3]) == (None, False)


@pytest.mark.parametrize("fate", ["killed", "hung"])
def test_writer_continues_without_the_store(
    pair: tuple[NodeProcess, Any, list[int]], fate: str
) -> None:
    node, server, _ = pair
    with hung(node) if fate == "hung" else contextlib.nullcontext():
        if fate == "killed":
            node.kill()
        for seed in range(2, 5):
            server.compute(server.hashes(seed, 5))
            with within(4.0):
                for payloads in server.worker._gather_offload_payloads():
                    server.worker._persist_pages_to_disk(payloads)
            assert server.references() == 0


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_save_to_hung_node_stores_original_bytes_or_nothing(
    start_node: Make, make_server: Make, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node hangs after the writer's lookup and before it gets the pages.

    LightLLM reuses the pages once the save has released them; the store must not get the new bytes.
    """
    monkeypatch.setenv("KVSTORE_WIRE", wire)
    monkeypatch.setenv("KVSTORE_AGENT_SAVE_TIMEOUT_S", "3")
    node = start_node()
    server = make_server(node.address)
    hashes = server.hashes(1, 8)
    server.service.query(hashes)  # connects
    pages = server.compute(hashes)
    before = server.memory[pages].clone()
    submit = server.service.pages._agent.save
    held = contextlib.ExitStack()

    def and_then(*arguments: Any) -> Any:
        held.enter_context(hung(node))
        return submit(*arguments)

    monkeypatch.setattr(server.service.pages._agent, "save", and_then)
    with held, within(8.0):
        for payloads in server.worker._gather_offload_payloads():
            server.worker._persist_pages_to_disk(payloads)
        assert server.references() == 0
        server.memory[pages] = POISON
    server.settle()
    with Client(ClientConfig(address=node.address)) as client:
        client.node_status(timeout_s=10)
    time.sleep(0.3)  # for data still in the node's sockets
    reader = make_server(node.address)
    found = reader.service.query(hashes)
    rows = torch.arange(8, dtype=torch.int32)
    task = reader.service.create(hash_128s=hashes, kv_page_indexer=rows, mode="r")
    reader.settle()
    read = [state is PyState.Finished for state in task.state()]
    assert sum(read) == [*found, False].index(False)
    for page in range(sum(read)):
        assert torch.equal(reader.memory[page], before[page])


@pytest.mark.parametrize("mode", ["r", "w"])
def test_aborted_job_leaves_pages_to_the_engine(
    pair: tuple[NodeProcess, Any, list[int]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node hangs as the job starts and resumes after the engine has reused the pages."""
    node, server, hashes = pair
    agent = server.service.pages._agent
    new, rows = server.hashes(7, 6), torch.arange(6, dtype=torch.int32)
    submit = agent.load if mode == "r" else agent.save
    with contextlib.ExitStack() as until_reused:

        def hang_first(*arguments: Any) -> Any:
            until_reused.enter_context(hung(node))
            return submit(*arguments)

        monkeypatch.setattr(agent, "load" if mode == "r" else "save", hang_first)
        wanted = hashes if mode == "r" else new
        task = server.service.create(hash_128s=wanted, kv_page_indexer=rows, mode=mode)
        with within(5.0):
            server.service.abort(task)
        server.memory[:6] = POISON
    server.settle()
    time.sleep(0.3)
    assert (server.memory[:6] == POISON).all()
    assert set(task.state()) == {PyState.Aborted}
    deadline = time.monotonic() + 60
    while not all(server.service.query(hashes)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if any(server.service.query(new)):  # pages saved before the abort have their original bytes
        monkeypatch.undo()
        read = server.service.create(hash_128s=new, kv_page_indexer=rows, mode="r")
        server.settle()
        assert read.state()[0] is PyState.Finished
        assert not (server.memory[0] == POISON).all()


def test_load_of_absent_pages_fails(
    pair: tuple[NodeProcess, Any, list[int]],
) -> None:
    """LightLLM takes an empty list of states for a success, so each page gets a state."""
    _, server, _ = pair
    absent = server.hashes(8, 3)
    task = server.service.create(
        hash_128s=absent, kv_page_indexer=torch.arange(3, dtype=torch.int32), mode="r"
    )
    server.settle()
    assert task.state() == [PyState.Aborted] * 3
    assert not server.worker.load_pages(absent, [0, 1, 2], 0)


def test_writer_thread_survives_node_restarts(
    start_node: Make, make_server: Make, tmp_path: Path
) -> None:
    """R11: after a restart, without intervention, pages on disk hit and new ones are stored."""
    flags = ("--data-dir", str(tmp_path / "data"), "--disk-bytes", "256MiB")
    node = start_node(*flags)
    ports = ("--port", node.address.rpartition(":")[2], "--bulk-port", str(node.bulk_port))
    server = make_server(node.address)
    writer = threading.Thread(target=server.worker.run, daemon=True)
    writer.start()
    stored: dict[int, tuple[list[int], torch.Tensor]] = {}

    def write(seed: int) -> None:
        hashes = server.hashes(seed, 4)
        stored[seed] = (hashes, server.memory[server.compute(hashes)].clone())

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert writer.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    write(1)
    wait(lambda: all(server.service.query(stored[1][0])))
    with Client(ClientConfig(address=node.address)) as client:
        client.flush()
    node.kill()
    write(2)  # lost: no node is running
    wait(lambda: server.references() == 0)
    assert server.service.query(stored[1][0]) == [False] * 4
    start_node(*flags, *ports)
    wait(lambda: all(server.service.query(stored[1][0])))
    write(3)
    wait(lambda: all(server.service.query(stored[3][0])))
    wait(lambda: server.references() == 0)
    assert server.service.query(stored[2][0]) == [False] * 4
    reader = make_server(node.address)
    for seed in (1, 3):
        hashes, bytes_before = stored[seed]
        given = reader.match(hashes)
        assert torch.equal(reader.memory[given], bytes_before)
        reader.release(given)


def test_damaged_page_is_not_loaded(
    start_node: Make, make_server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum is verified before any byte reaches LightLLM's memory."""
    monkeypatch.setenv("KVSTORE_WIRE", "shm")
    node = start_node()
    server = make_server(node.address)
    hashes = server.hashes(1, 5)
    server.compute(hashes)
    server.persist()
    namespace = server.service.namespace
    with (
        Client(ClientConfig(address=node.address, wire="shm")) as client,
        client.open_get(namespace, keys(hashes)) as slots,
    ):
        slots.arena.memory[slots.offsets[3]] ^= 1
    reader = make_server(node.address)
    reader.memory[:] = POISON
    given = reader.match(hashes)
    assert (given, reader.loaded_tokens) == ([], 0)
    assert reader.references() == 0
    # The node has dropped the page.
    assert server.service.query(hashes) == [
        True,
        True,
        True,
        False,
        True,
    ]
    given = reader.match(hashes)
    assert (len(given), reader.loaded_tokens) == (3, 3 * 64)
    reader.release(given)
