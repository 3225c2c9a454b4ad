"""A call interrupted by Ctrl-C or a signal does not touch its buffers afterwards."""

import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, settle

from kvstore import checksum, messages
from kvstore.buffers import _exported
from kvstore.transports import grpc_wire, mapped_memory, shm
from kvstore.transports.connections import request_header
from node.server import Node


@pytest.mark.parametrize("in_main", [True, False])
def test_grpc_put_reads_pages_in_a_thread_that_it_joins(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, in_main: bool
) -> None:
    """gRPC's own sending thread may go on after the call has ended, so it must not read pages."""
    client, read, waited = connect(node, "grpc"), set[int](), set[int]()
    chunk_frame, put_all = messages.chunk_frame, grpc_wire.GrpcWire._put_all

    def seen(run: list[memoryview]) -> bytes:
        read.add(threading.get_ident())
        return chunk_frame(run)

    def waited_for(*arguments: Any) -> list[int]:
        waited.add(threading.get_ident())
        return put_all(*arguments)

    monkeypatch.setattr(grpc_wire, "WHOLE_PAGES_MAX", 0)  # streams only
    monkeypatch.setattr(grpc_wire, "chunk_frame", seen)
    monkeypatch.setattr(grpc_wire.GrpcWire, "_put_all", waited_for)
    if in_main:
        pages.put(client, pages.keys(1, 2))
    else:
        with concurrent.futures.ThreadPoolExecutor(1) as another:
            another.submit(pages.put, client, pages.keys(3, 4)).result(60.0)
    assert read == waited
    assert len(read) == 1
    assert (threading.get_ident() in read) is False


@pytest.mark.parametrize("whole_pages_max", [0, grpc_wire.WHOLE_PAGES_MAX])
def test_interrupted_grpc_put_stores_nothing(
    node: Node,
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    whole_pages_max: int,
) -> None:
    monkeypatch.setattr(grpc_wire, "WHOLE_PAGES_MAX", whole_pages_max)
    client, keys, leaves = connect(node, "grpc"), pages.keys(11, 12), checksum.joined_leaves
    client.open(pages.namespace)

    def interrupted(page: Sequence[memoryview], nbytes: int) -> bytes:
        if page[0] == buffers[1]:
            raise KeyboardInterrupt
        return leaves(page, nbytes)

    monkeypatch.setattr(grpc_wire, "joined_leaves", interrupted)
    buffers = [bytearray(pages.content(key)) for key in keys]
    with pytest.raises(KeyboardInterrupt) as held:  # an engine may keep the exception
        client.put(pages.namespace, keys, buffers)
    while node.tier.writing_count:
        threading.Event().wait(0.01)
    assert pages.get(connect(node, "bulk"), keys) == [False, False]
    assert held.tb is not None, (
        "the traceback must keep the stream alive, because gRPC ends collected streams"
    )


def test_shm_get_interrupted_before_its_release_holds_nothing(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the node would hold the pages while this process lives, and refuse the next get."""
    client, keys, interrupts = connect(node, "shm"), pages.keys(31, 32), [True]
    pages.put(client, keys)

    def interrupted(op: str, request: Any) -> bytes:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return request_header(op, request)

    monkeypatch.setattr("kvstore.transports.mapped_memory.request_header", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pages.get(client, keys)
    settle(node, sessions=None)
    assert pages.get(client, keys) == [True, True]


@pytest.mark.parametrize("op", ["put", "get"])
def test_interrupt_during_a_copy_is_raised(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """The caller gets the interrupt, not an error about a buffer that is still exported."""
    client, keys = connect(node, "shm"), pages.keys(41, 42)
    client.open(pages.namespace)
    if op == "get":
        pages.put(client, keys)

    def interrupted(buffer: Any, flags: int) -> Any:
        found = _exported(buffer, flags)
        # Only for the node's memory
        if threading.current_thread() is threading.main_thread() and (op == "put" or not flags):
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.transports.shm.HELD_NBYTES_MAX", 0)
        patch.setattr("kvstore.buffers._exported", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(pages, op)(client, keys)
    settle(node, sessions=None)
    assert pages.get(client, keys) == [op == "get"] * 2


def test_second_interrupt_before_the_release_keeps_the_client_usable(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection, whose slots the node still holds, is not used again, and the slots are
    freed.
    """
    client, keys = connect(node, "shm"), pages.keys(31, 32)
    pages.put(client, keys)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shm, "release", interrupted)
        patched.setattr(mapped_memory, "release", interrupted)
        with pytest.raises(KeyboardInterrupt), client.open_get(pages.namespace, keys):
            raise KeyboardInterrupt
    for _ in range(2):
        with client.open_get(pages.namespace, keys) as slots:
            assert slots.hits == [True, True]
    settle(node, sessions=None)
