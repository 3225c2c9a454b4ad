"""Replication of pages to all their owners, acks that wait for it, and reads of replicas."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import counts, owners, plant, present, tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import Connect, ConnectRaw, StartNode
from waiting import wait_until

from kvstore import Exhausted, InvalidRequest, Keep, PutOutcome
from kvstore.checksum import leaves
from kvstore.pb import kvstore_pb2 as pb
from node.cluster import replication_queue
from node.server import Node
from node.serving.http_server import HttpClient
from node.serving.metrics import metrics_text

NUMBERS = range(24)


@pytest.fixture
def pair(start_node: StartNode) -> Iterator[list[Node]]:
    """Start two nodes, each the replica of the other."""
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, 2))
    yield nodes
    wait_replicated(nodes)


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_put_is_replicated_to_all_owners_only(
    start_node: StartNode, connect: Connect, pages: Pages, wire: str
) -> None:
    nodes = [start_node() for _ in range(3)]
    view = view_of(nodes, 2)
    tell(nodes, view)
    client, keys = connect(nodes[0], wire, near="none"), pages.keys(*NUMBERS)
    assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
    wait_replicated(nodes)
    for number, node in enumerate(nodes):
        mine = [f"n{number}" in some for some in owners(view, pages.namespace, keys)]
        assert present(node, pages.namespace, keys) == mine
        direct = connect(node, direct=True)
        assert pages.get(direct, keys) == mine, "the owners must have the right bytes"
    handed = [counts(node) for node in nodes]
    assert sum(some.pages_handed for some in handed) == len(keys)
    assert [(some.pages_dropped, some.queue_pages, some.queue_nbytes) for some in handed] == [
        (0, 0, 0)
    ] * 3


def test_node_without_a_cluster_replicates_nothing(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    node = start_node()
    client = connect(node)
    client.put(pages.namespace, pages.keys(1), [pages.content(pages.key(1))], Keep(ack="all"))
    assert not node.peers.replicator._threads
    assert not client.node_status().peers


def test_single_owner_replicates_nothing(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, 1))
    pages.put(connect(nodes[0]), pages.keys(*NUMBERS))
    assert [node.peers.replicator._threads for node in nodes] == [[], []]


def test_existing_page_is_not_replicated_again(
    pair: list[Node], connect: Connect, pages: Pages
) -> None:
    client, keys = connect(pair[0], direct=True), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(pair)
    connect(pair[1], direct=True).remove(pages.namespace, keys[:5])
    assert pages.put(client, keys) == [PutOutcome.EXISTS] * len(keys)
    wait_replicated(pair)
    assert counts(pair[0]).pages_handed == len(keys)
    client.put(pages.namespace, keys, [pages.content(key) for key in keys], Keep(ack="all"))
    assert present(pair[1], pages.namespace, keys) == [True] * len(keys)


def test_time_to_live_is_replicated(pair: list[Node], connect: Connect, pages: Pages) -> None:
    key, client = pages.key(1), connect(pair[0], direct=True)
    client.put(pages.namespace, [key], [pages.content(key)], Keep(ttl_s=100.0))
    wait_replicated(pair)
    (page,) = connect(pair[1], direct=True).stat(pages.namespace, [key])
    assert 98_000 <= page.ttl_ms <= 100_000


def test_forwarded_put_is_not_replicated_again(
    pair: list[Node], raw: ConnectRaw, connect: Connect, pages: Pages
) -> None:
    connect(pair[0], direct=True).open(pages.namespace)
    connection = raw(pair[0])
    put = pb.PutRequest(
        namespace=pages.namespace.digest,
        prefix_hashes=pages.keys(1),
        page_nbytes=pages.nbytes,
        forwarded_by="n1",
    )
    assert list(connection.ask(put=put).put.verdicts) == [pb.WRITE]
    connection.send_frame(b"", pages.nbytes)
    connection.send(memoryview(pages.content(pages.key(1))))
    connection.ask(commit=pb.CommitRequest(leaves=[leaves(pages.content(pages.key(1)))]))
    assert not pair[0].peers.replicator._threads


@pytest.mark.parametrize("alone", [True, False])
def test_forwarded_put_of_an_unknown_member_is_refused(
    pair: list[Node],
    start_node: StartNode,
    raw: ConnectRaw,
    connect: Connect,
    pages: Pages,
    alone: bool,
) -> None:
    node = start_node() if alone else pair[0]
    connect(node, direct=True).open(pages.namespace)
    put = pb.PutRequest(
        namespace=pages.namespace.digest,
        prefix_hashes=pages.keys(1),
        page_nbytes=pages.nbytes,
        forwarded_by="n7",
    )
    error = raw(node).ask(put=put).error
    assert "'n7', which is no member of" in error.message
    assert "without forwarded_by" in error.message
    assert present(node, pages.namespace, pages.keys(1)) == [False]


def test_ack_all_returns_when_all_owners_have_the_pages(
    pair: list[Node], connect: Connect, pages: Pages
) -> None:
    client = connect(pair[0], direct=True)
    for start in range(0, 40, 4):
        keys = pages.keys(*range(start, start + 4))
        client.put(pages.namespace, keys, [pages.content(key) for key in keys], Keep(ack="all"))
        assert present(pair[1], pages.namespace, keys) == [True] * 4


def test_ack_all_with_a_dead_owner_is_exhausted(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    nodes = [start_node(), start_node()]
    tell(nodes[:1], view_of(nodes, 2, elsewhere={1: "127.0.0.1:9"}))
    client, keys = connect(nodes[0], direct=True), pages.keys(1, 2)
    began = time.monotonic()
    with pytest.raises(Exhausted, match="visible but not at all owners"):
        client.put(
            pages.namespace,
            keys,
            [pages.content(key) for key in keys],
            Keep(ack="all"),
            timeout_s=4.0,
        )
    assert time.monotonic() - began < 12.0
    assert pages.get(client, keys) == [True, True]
    nodes[0].peers.replicator._follow(view_of(nodes[:1], 2))  # former members are not awaited


def test_ack_all_fails_if_one_key_lacks_an_owner(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    """The error is raised although other keys of the call are at all their owners."""
    nodes = [start_node() for _ in range(3)]
    view = view_of(nodes, 2, elsewhere={2: "127.0.0.1:9"})
    tell(nodes[:2], view)
    every = pages.keys(*range(200))
    routes = dict(zip(every, owners(view, pages.namespace, every), strict=True))
    keys = [key for key in every if routes[key] in (("n0", "n1"), ("n1", "n2"))][: NUMBERS.stop]
    client = connect(nodes[0])
    with pytest.raises(Exhausted, match="visible but not at all owners"):
        client.put(
            pages.namespace,
            keys,
            [pages.content(key) for key in keys],
            Keep(ack="all"),
            timeout_s=20.0,  # half of it for n1, which answers in nine tenths of that
        )
    assert pages.get(client, keys) == [True] * len(keys)
    tell(nodes[:2], view_of(nodes[:2], 2, number=2))


@pytest.mark.parametrize("stored", [False, True])
def test_durable_and_ack_all_is_durable_at_all_owners(
    start_node: StartNode, connect: Connect, pages: Pages, tmp_path: Path, stored: bool
) -> None:
    nodes = [start_node(data_dir=str(tmp_path / name), disk_nbytes=64 << 20) for name in "ab"]
    tell(nodes, view_of(nodes, 2))
    client, keys = connect(nodes[0], direct=True, timeout_s=10.0), pages.keys(*NUMBERS)
    contents = [pages.content(key) for key in keys]
    if stored:
        client.put(pages.namespace, keys, contents)
    client.put(pages.namespace, keys, contents, Keep(durable=True, ack="all"))
    for node in nodes:
        assert node.disk is not None
        assert node.disk.safe(pages.namespace.digest, keys) == [True] * len(keys)


def test_pages_only_on_disk_are_replicated(
    start_node: StartNode, connect: Connect, pages: Pages, tmp_path: Path
) -> None:
    nodes = [start_node(data_dir=str(tmp_path / "a"), disk_nbytes=64 << 20), start_node()]
    client, keys = connect(nodes[0], direct=True, timeout_s=10.0), pages.keys(*NUMBERS)
    client.put(pages.namespace, keys, [pages.content(key) for key in keys], Keep(durable=True))
    tier = nodes[0].tier
    with tier.lock:
        index = tier.namespaces.find(pages.namespace.digest)
        for key in keys:
            tier.forget(index.pages[key], "evicted")
    tell(nodes, view_of(nodes, 2))
    promises = nodes[0].service.write_acks
    waiter = promises.replicate(
        pages.namespace.digest, keys + pages.keys(99), [{"n1"}] * (len(keys) + 1)
    )
    assert not nodes[0].peers.replicator.wait(waiter, time.monotonic() + 10.0, lambda: False), (
        "one page does not exist"
    )
    assert (waiter.open_count, waiter.lost_count) == (0, 1)
    assert pages.get(connect(nodes[1], direct=True), keys) == [True] * len(keys)


def test_page_damaged_in_the_senders_memory_is_not_replicated(
    pair: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target computes checksums from received bytes, so it would make damaged bytes valid."""
    client, keys = connect(pair[0], direct=True), pages.keys(*range(6))
    pair[0].peers.replicator._changed.acquire()  # blocks the replication
    try:
        putting = threading.Thread(target=pages.put, args=(client, keys))
        putting.start()
        wait_until(lambda: pair[0].tier.held_count == len(keys))
        pages.flip(pair[0], keys[2])
    finally:
        pair[0].peers.replicator._changed.release()
    putting.join()
    wait_replicated(pair)
    wanted = [True, True, False, True, True, True]
    assert present(pair[1], pages.namespace, keys) == wanted
    assert pages.get(connect(pair[1], direct=True), keys) == wanted
    assert pages.get(client, keys) == wanted
    assert counts(pair[0]).pages_handed == 5


def test_unknown_ack_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be one of one, all"):
        Keep(ack="two")


def test_replica_has_the_head_of_a_chain_as_its_newest_page(
    pair: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the replica would evict the head first, and the rest would be useless."""
    monkeypatch.setattr(replication_queue, "BATCH_PAGES_MAX", 4)
    monkeypatch.setattr(replication_queue, "BATCH_NBYTES_MAX", 1 << 20)
    asked: list[list[bytes]] = []
    begin_put = pair[1].service.begin_put

    def recorded(session: Any, request: pb.PutRequest) -> Any:
        asked.append(list(request.prefix_hashes))
        return begin_put(session, request)

    monkeypatch.setattr(pair[1].service, "begin_put", recorded)
    keys = pages.keys(*range(12))
    pages.put(connect(pair[0], direct=True), keys)
    wait_replicated(pair)
    assert asked == [keys[8:], keys[4:8], keys[:4]]


def test_owner_fetches_pages_that_could_not_be_handed_to_it(
    pair: list[Node], connect: Connect, pages: Pages
) -> None:
    """A link that broke, or a full queue, must not leave single copies until the hourly sweep."""
    sender, owner = pair
    keys = pages.keys(*NUMBERS)
    plant(sender, pages, keys)
    sender.peers.replicator._queue.missed["n1"] += len(keys)
    assert counts(sender).pages_under_replicated == len(keys)
    text = metrics_text(sender.service)({}, HttpClient("me", ())).body().decode()
    assert f"\nkvstore_pages_under_replicated {float(len(keys))}\n" in text
    assert connect(owner, direct=True).sweep(dry=True).pages_missing == len(keys)
    under = counts(sender).pages_under_replicated, counts(owner).pages_under_replicated
    assert under == (0, len(keys)), "what was only compared is not repaired"
    sender.peers.replicator._queue.missed["n1"] += len(keys)
    owner.peers.rebalancer.expect(3)
    assert counts(owner).pages_under_replicated == len(keys) + 3
    owner.peers.rebalancer.expect(1 << 64)  # a status has no room for more
    assert counts(owner).pages_under_replicated < 1 << 32
    owner.peers.rebalancer.missed_s = 0.1
    pages.put(connect(sender, direct=True), pages.keys(99))
    wait_until(lambda: present(owner, pages.namespace, keys) == [True] * len(keys))
    wait_until(lambda: counts(owner).pages_under_replicated == 0)
    assert counts(sender).pages_under_replicated == 0
    assert pages.get(connect(owner, direct=True), keys) == [True] * len(keys)
    assert [event.kind for event in owner.events.since()][-2:] == ["under-replicated", "repaired"]


def test_metrics_count_replicated_pages(pair: list[Node], connect: Connect, pages: Pages) -> None:
    pages.put(connect(pair[0], direct=True), pages.keys(*NUMBERS))
    wait_replicated(pair)
    text = metrics_text(pair[0].service)({}, HttpClient("me", ())).body().decode()
    found = dict(line.split() for line in text.splitlines() if line.startswith("kvstore_peers_"))
    metrics = {name.removeprefix("kvstore_peers_"): float(value) for name, value in found.items()}
    assert {
        name: value
        for name, value in metrics.items()
        if name.startswith(("queue", "pages_ha", "bytes_ha", "pages_d"))
    } == {
        "queue_pages": 0,
        "queue_bytes": 0,
        "queue_bytes_max": 512 << 10,
        "pages_handed_total": len(NUMBERS),
        "bytes_handed_total": len(NUMBERS) * pages.nbytes,
        "pages_dropped_total": 0,
    }


def test_waiting_ack_all_puts_leave_grpc_transfers_to_others(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    node = start_node(grpc_threads=4)  # three transfers, one of which may wait
    tell([node], view_of([node, node], 2, elsewhere={1: "127.0.0.1:9"}))
    client = connect(node, "grpc", direct=True, timeout_s=60.0)
    key, other = pages.keys(1, 2)

    def wait_for_all() -> None:
        with pytest.raises(Exhausted, match="not at all owners"):
            client.put(pages.namespace, [key], [pages.content(key)], Keep(ack="all"))

    waiting = threading.Thread(target=wait_for_all)
    waiting.start()
    wait_until(lambda: node.tier.held_count == 1)
    with pytest.raises(Exhausted, match="gRPC durable puts"):
        client.put(pages.namespace, [other], [pages.content(other)], Keep(ack="all"))
    assert pages.put(client, [other]) == [PutOutcome.STORED]
    tell([node], view_of([node], 2, 2))  # former members are not awaited
    waiting.join()
