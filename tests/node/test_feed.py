"""The feed of a node: what each reader is told, by each wire, and what it costs others."""

import heapq
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from fleet import view_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from people import People, client, namespace
from replayed import Caller, Reader, listed, only
from told_blocks import ToldBlocks

from kvstore import (
    Client,
    Forbidden,
    InvalidRequest,
    PutOutcome,
    Unauthenticated,
    Unavailable,
)
from kvstore.cluster.feed import CURSOR_NBYTES
from kvstore.keys import block_part, part_of
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.feed import change_log
from node.feed import feed as module
from node.feed.models import Models
from node.memory import changes
from node.memory.changes import ChangeRing
from node.memory.page import NamespaceIndex
from node.server import Node

IDLE_S = 0.1


@pytest.fixture
def stub(node: Node) -> Iterator[KVStoreStub]:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        yield KVStoreStub(channel)


@pytest.mark.parametrize("wire", ["bulk", "shm", "grpc"])
def test_feed_tells_what_is_stored_and_removed(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client = connect(node, wire)
    pages.put(client, pages.keys(1, 2))
    told = ToldBlocks(client.feed(idle_s=IDLE_S))
    told.until_kind("ready")
    assert told.kinds[0] == "reset"
    assert told.of(pages.namespace) == {*pages.keys(1, 2)}
    pages.put(client, pages.keys(3))
    told.until(lambda: pages.key(3) in told.of(pages.namespace))
    client.remove(pages.namespace, pages.keys(1))
    told.until(lambda: told.of(pages.namespace) == {*pages.keys(2, 3)})
    client.remove_namespace(pages.namespace)
    told.until(lambda: not told.of(pages.namespace))
    told.until_kind("idle")
    assert told.kinds.count("reset") == 1


def test_block_counts_when_all_ranks_have_it(node: Node, connect: Connect) -> None:
    client = connect(node)
    ranks = [Pages("two ranks", tp_rank=rank, tp_size=2) for rank in range(2)]
    reader, key = Reader(), ranks[0].keys(1)
    model = block_part(ranks[0].namespace).id
    ranks[0].put(client, key)
    assert model not in reader.catch_up(node)
    ranks[1].put(client, key)
    assert reader.catch_up(node)[model] == {*key}
    client.remove(ranks[0].namespace, key)
    assert model not in reader.catch_up(node)
    assert reader.begins == 1


def test_block_ends_with_the_first_of_its_parts(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now_s = connect(node), node.tier.clock_s()
    monkeypatch.setattr(node.tier, "clock_s", lambda: now_s)
    ranks = [Pages("two ends", tp_rank=rank, tp_size=2) for rank in range(2)]
    reader, model = Reader(), block_part(ranks[0].namespace).id
    for number, ttls_s in enumerate(((10, 0), (0, 20), (30, 20), (0, 0))):
        for rank, ttl_s in zip(ranks, ttls_s, strict=True):
            rank.put(client, rank.keys(number), ttl_s=float(ttl_s))
    assert reader.catch_up(node)[model] == {*ranks[0].keys(0, 1, 2, 3)}
    for passed_s, left in ((9, (0, 1, 2, 3)), (10, (1, 2, 3)), (20, (3,))):
        monkeypatch.setattr(node.tier, "clock_s", lambda passed_s=passed_s: now_s + passed_s)
        assert reader.catch_up(node)[model] == {*ranks[0].keys(*left)}
    assert reader.begins == 1


def test_block_counts_when_all_groups_have_it(node: Node, connect: Connect) -> None:
    client = connect(node)
    groups = [
        Pages("groups", 4096 << group, tp_size=1 + group, part=part_of("c", group, 2))
        for group in range(2)
    ]
    second = Pages("groups", 8192, tp_rank=1, tp_size=2, part=groups[1].namespace.part)
    reader, key = Reader(), groups[0].keys(1)
    model = block_part(groups[0].namespace).id
    for part in (*groups, second):
        assert model not in reader.catch_up(node)
        part.put(client, key)
    assert reader.catch_up(node)[model] == {*key}


def test_part_that_is_known_later_tells_all_anew(node: Node, connect: Connect) -> None:
    """As after a restart with rows of an older node, until the engine opens its namespaces."""
    client, engine, reader = connect(node), connect(node), Reader()
    unknown = [Pages("later", 4096 << group) for group in range(2)]
    for pages in unknown:
        pages.put(client, pages.keys(1))
    assert len(reader.catch_up(node, "later")) == 2
    named = [Pages("later", 4096 << group, part=part_of("d", group, 2)) for group in range(2)]
    assert [pages.namespace.digest for pages in named] == [p.namespace.digest for p in unknown]
    for pages in named:
        engine.open(pages.namespace)
    model = block_part(named[0].namespace).id
    assert reader.catch_up(node, "later") == {model: {*named[0].keys(1)}}
    assert reader.begins == 2


def test_blocks_of_a_model_that_needs_more_now_are_not_told_any_more(
    node: Node, connect: Connect
) -> None:
    """Somebody opens a further group, or rank, of a KV that seemed to be complete."""
    client, reader = connect(node), Reader()
    for name, of_more in (("e", part_of("e", 1, 2)), ("f", part_of("f", 0, 1, ranks=2))):
        few = Pages(name, 4096, part=part_of(name, 0, 1, ranks=1))
        more = Pages(name, 8192, part=of_more, tp_rank=1, tp_size=2)
        few.put(client, few.keys(1, 2))
        assert reader.catch_up(node, name) == {block_part(few.namespace).id: {*few.keys(1, 2)}}
        more.put(client, more.keys(3))
        assert reader.catch_up(node, name) == Reader().catch_up(node, name) == {}


def test_parts_of_other_weights_do_not_complete_a_block(node: Node, connect: Connect) -> None:
    client = connect(node)
    for rank, epoch in ((0, 1), (1, 2)):
        part = Pages("epochs", tp_rank=rank, tp_size=2, epoch=epoch)
        part.put(client, part.keys(1))
    reader = Reader()
    reader.catch_up(node, "epochs")
    assert not reader.now()


def test_only_the_model_that_was_asked_for(node: Node, connect: Connect) -> None:
    client = connect(node)
    one, other = Pages("this one"), Pages("another one")
    for pages in (one, other):
        pages.put(client, pages.keys(1))
    reader = Reader()
    assert reader.catch_up(node, "this one") == {block_part(one.namespace).id: {*one.keys(1)}}
    other.put(client, other.keys(2))
    assert reader.catch_up(node, "this one") == {block_part(one.namespace).id: {*one.keys(1)}}
    with pytest.raises(InvalidRequest, match="longer"):
        reader.poll(node, "x" * 2000)


def test_tenants_see_their_own(start_node: StartNode, tmp_path: Path) -> None:
    people = People(tmp_path / "identities")
    people.join("a", "team-a", "write")
    people.join("b", "team-b", "write")
    people.join("everybody's", "*", "read")
    node = start_node(identities=str(people.path))
    with (
        client(node, people.tokens["a"]) as a,
        client(node, people.tokens["b"]) as b,
        client(node, people.tokens["everybody's"]) as of_all,
        client(node, "wrong." + "x" * 43) as stranger,
    ):
        spaces = [namespace("team-a"), namespace("team-b")]
        keys = [[b"a" * 32], [b"b" * 32]]
        for who, space, some in zip((a, b), spaces, keys, strict=True):
            who.put(space, some, [bytes(4096)])
        for who, seen in ((a, [0]), (b, [1]), (of_all, [0, 1])):
            told = ToldBlocks(who.feed(idle_s=IDLE_S))
            told.until_kind("ready")
            expected = {block_part(spaces[n]).id: {*keys[n]} for n in seen}
            assert {m: k for m, k in told.stored.items() if k} == expected
        with pytest.raises((Unauthenticated, Forbidden)):
            next(stranger.feed())


def test_grpc_streams_a_snapshot_and_then_changes(
    stub: KVStoreStub, node: Node, connect: Connect, pages: Pages
) -> None:
    client = connect(node)
    pages.put(client, pages.keys(1, 2))
    stream = stub.Feed(pb.FeedRequest(model=pages.namespace.model), timeout=60.0)
    reader = Reader()
    while not reader.begins or len(reader.cursor) > CURSOR_NBYTES:
        reader.take(next(stream))
    assert reader.now() == {block_part(pages.namespace).id: {*pages.keys(1, 2)}}
    client.remove(pages.namespace, pages.keys(1))
    while reader.now() != {block_part(pages.namespace).id: {*pages.keys(2)}}:
        reader.take(next(stream))
    stream.cancel()
    pages.put(client, pages.keys(3))
    # It continues where it was
    again = stub.Feed(
        pb.FeedRequest(cursor=reader.cursor, model=pages.namespace.model), timeout=60.0
    )
    while reader.now() != {block_part(pages.namespace).id: {*pages.keys(2, 3)}}:
        reader.take(next(again))
    again.cancel()
    assert reader.begins == 1


def test_nonsense_cursors_begin_anew(stub: KVStoreStub) -> None:
    for cursor in (b"x", bytes(16), bytes(28), b"\xff" * 16, b"\xff" * 28, bytes(1000)):
        reply = next(iter(stub.Feed(pb.FeedRequest(cursor=cursor, wait_ms=1), timeout=60.0)))
        assert reply.begin


def test_only_members_of_a_cluster_tell_as_members(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="no cluster"):
        node.service.feed.poll(pb.FeedRequest(member=True), Caller(), lambda model: True)


# ---- what it costs ---------------------------------------------------------------------------


def test_streams_leave_calls_to_others(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    """As many streams as one peer may have, at a node that allows it eight calls."""
    node = start_node(grpc_threads=4)
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        streams = [KVStoreStub(channel).Feed(pb.FeedRequest(), timeout=60.0) for _ in range(8)]
        for stream in streams:
            assert next(iter(stream)).begin
            assert not next(iter(stream)).begin  # from here on it waits for news
        pages.put(connect(node, "grpc"), pages.keys(1))
        for stream in streams:
            stream.cancel()


def test_nothing_is_noted_without_a_reader(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    node = start_node()
    assert node.tier.changes is None
    reader = Reader()
    reader.catch_up(node)
    assert node.tier.changes is not None
    node.service.feed.look()
    assert node.tier.changes is not None
    monkeypatch.setattr(module, "IDLE_S", -1.0)
    node.service.feed.look()
    assert node.tier.changes is None
    pages.put(connect(node), pages.keys(1))
    assert reader.catch_up(node) == {block_part(pages.namespace).id: {*pages.keys(1)}}
    assert reader.begins == 2


def test_puts_do_not_wait_for_readers(node: Node, connect: Connect, pages: Pages) -> None:
    """A reader that hangs inside the feed, and one that does not take its replies."""
    client, slow = connect(node), Reader()
    slow.catch_up(node)
    with node.service.feed._lock:
        pages.put(client, pages.keys(*range(50)))
        client.remove(pages.namespace, pages.keys(*range(25)))
    assert slow.catch_up(node)[block_part(pages.namespace).id] == {*pages.keys(*range(25, 50))}


def test_reader_that_was_too_slow_gets_a_snapshot(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    monkeypatch.setattr(changes, "ENTRIES", 8)
    node = start_node()
    client, reader = connect(node), Reader()
    reader.catch_up(node)
    for number in range(9):
        pages.put(client, pages.keys(number))
    assert reader.catch_up(node)[block_part(pages.namespace).id] == {*pages.keys(*range(9))}
    assert reader.begins == 2


def test_reply_about_many_models_is_no_longer_than_a_message(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a reader behind many namespaces of others got a reply that no wire takes, again
    and again.
    """
    monkeypatch.setattr(module, "REPLY_NBYTES", 5000)
    node = start_node()
    client, fast, slow = connect(node), Reader(), Reader()
    slow.catch_up(node)
    for number in range(20):
        pages = Pages(f"{number:0>1000}")
        pages.put(client, pages.keys(1))
        fast.catch_up(node)
        client.remove_namespace(pages.namespace)
    lengths = list[int]()
    while (reply := slow.poll(node)).changes:
        lengths.append(reply.ByteSize())
    assert (slow.begins, slow.now()) == (1, {})
    assert len(slow.names) == 20
    assert max(lengths) < 5000 + 100


def test_snapshot_ends_while_more_changes_than_is_kept(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    """Regression: the reader began anew again and again, for as long as much changed."""
    monkeypatch.setattr(change_log, "KEYS_MAX", 100)
    monkeypatch.setattr(module, "PART_KEYS", 2)
    node = start_node()
    client, reader = connect(node), Reader()
    pages.put(client, pages.keys(*range(40)))
    polls = 0
    while reader.poll(node).snapshot:
        some = pages.keys(*range(polls % 60, polls % 60 + 8))
        pages.put(client, some)
        client.remove(pages.namespace, some[::2])
        polls += 1
    truth = {page.prefix_hash for page in client.list_pages(pages.namespace)}
    assert only(reader.catch_up(node), pages.namespace) == truth
    assert reader.begins == 1
    assert polls > 20


@pytest.mark.parametrize("failing", ["read", "open", "add", "restart"])
def test_changes_that_could_not_be_told_begin_a_snapshot(
    start_node: StartNode,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    pages: Pages,
    failing: str,
) -> None:
    """Regression: they were read from the ring, and so told to nobody."""
    node, read = start_node(), ChangeRing.read
    client, reader, other = connect(node), Reader(), Pages("opened")
    pages.put(client, pages.keys(0))
    reader.catch_up(node)
    pages.put(client, pages.keys(1))
    fails = Mock(side_effect=MemoryError)
    with monkeypatch.context() as patch:
        if failing == "read":
            patch.setattr(ChangeRing, "read", lambda ring: (read(ring), fails()))
        elif failing == "open":
            other.put(client, other.keys(1))
            patch.setattr(Models, "_build", fails)
        else:
            patch.setattr(change_log.ChangeLog, "add", fails)
        with pytest.raises(MemoryError):
            reader.poll(node)
        if failing == "restart":
            patch.setattr(module, "ChangeRing", fails)
            with pytest.raises(MemoryError):
                reader.poll(node)
    assert reader.catch_up(node) == listed(client, [pages.namespace, other.namespace])


def test_changes_that_could_not_be_noted_harm_no_writer(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    """Regression: a removed page kept its slot for ever."""
    node = start_node()
    client, reader = connect(node), Reader()
    pages.put(client, pages.keys(1, 2))
    reader.catch_up(node)
    with monkeypatch.context() as patch:
        patch.setattr(ChangeRing, "_add", Mock(side_effect=MemoryError))
        assert client.remove(pages.namespace, pages.keys(1)) == [True]
        assert pages.put(client, pages.keys(3)) == [PutOutcome.STORED]
    assert node.check() == []
    assert only(reader.catch_up(node), pages.namespace) == {*pages.keys(2, 3)}
    assert reader.begins == 2


def test_page_of_a_namespace_that_is_opened_anew_meanwhile_is_told(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    """Regression: it was looked for in the namespace as it was before."""
    node, refresh, digest = start_node(), Models.refresh, pages.namespace.digest
    client, reader, opened = connect(node), Reader(), list[bool]()
    pages.put(client, pages.keys(1))
    assert reader.catch_up(node)
    client.remove(pages.namespace, pages.keys(1))
    assert reader.catch_up(node) == {}

    def open_anew(models: Models, spaces: list[NamespaceIndex]) -> bool:
        found = refresh(models, spaces)
        if not opened:
            with node.tier.lock:
                opened.append(node.tier.namespaces.close(digest))
            pages.put(connect(node), pages.keys(2))
        return found

    monkeypatch.setattr(Models, "refresh", open_anew)
    reader.poll(node)
    assert reader.catch_up(node) == listed(client, [pages.namespace]) != {}
    assert opened == [True]


@pytest.mark.parametrize("member", [False, True])
def test_feed_of_a_closed_client_ends(
    start_node: StartNode, connect: Connect, member: bool
) -> None:
    """Regression: it told for ever that the client is closed."""
    node = start_node()
    if member:
        node.membership.become(view_of([node]), "n0")
    reader = connect(node)
    told_so_far = ToldBlocks(reader.feed(idle_s=0.1))
    told_so_far.until_kind("ready")
    reader.close()
    with pytest.raises(Unavailable, match="this client is closed"):
        told_so_far.until_kind("never")


def test_periodic_look_does_not_wait_for_a_reader_that_hangs(node: Node) -> None:
    """It shares a thread with the look at the identities."""
    Reader().catch_up(node)
    with node.service.feed._lock:
        node.service.feed.look()


def test_changes_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "CHANGES_MAX", 4)
    kept = change_log.ChangeLog()
    for number in range(10):
        kept.add(b"model", True, [b"%d" % number])
    assert [change.sequence for change in kept.after(6)] == [7, 8, 9, 10]
    assert kept.has_next_of(6)
    assert not kept.has_next_of(5)


def test_change_log_counts_the_keys_that_a_reader_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "CHANGES_MAX", 4)
    kept = change_log.ChangeLog()
    assert kept.keys_after(0) == 0
    for count in range(1, 7):
        kept.add(b"model", False, [b"%d" % number for number in range(count)])
    assert [kept.keys_after(sequence) for sequence in (6, 5, 2)] == [0, 6, 3 + 4 + 5 + 6]
    assert kept.keys_after(1) == 21  # it needs a snapshot


def test_expiry_that_changes_needs_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRIES_MAX", 1)
    expiries = module.Expiries()
    assert expiries.note(b"model", b"a", 10)
    assert not expiries.note(b"model", b"b", 10)
    assert expiries.note(b"model", b"a", 20)
    assert expiries.due(15) == []
    assert expiries.due(20) == [(b"model", b"a")]


def test_expiry_that_could_not_be_noted_is_noted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody would be told that the block has expired."""
    expiries = module.Expiries()
    with monkeypatch.context() as patch:
        patch.setattr(heapq, "heappush", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            expiries.note(b"model", b"a", 10)
    assert expiries.note(b"model", b"a", 10)
    assert expiries.due(10) == [(b"model", b"a")]


def test_ring_takes_changes_of_many_threads() -> None:
    """All changes arrive, each once, in whatever order."""
    ring, count, threads = ChangeRing(), 2000, 4
    found: list[bytes] = []

    def write(writer: int) -> None:
        for number in range(count):
            ring.went(b"d", b"%d %d" % (writer, number))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(threads)]
    for writer in writers:
        writer.start()
    while len(found) < count * threads:
        read = ring.read()
        assert read is not None
        found += [hashes[0] for _, _, hashes, _ in read]
        time.sleep(0)
    for writer in writers:
        writer.join()
    assert len(set(found)) == count * threads


# ---- writers beside readers ------------------------------------------------------------------


def test_replay_equals_the_list_after_concurrent_writers(
    start_node: StartNode, connect: Connect
) -> None:
    node = start_node(ram_nbytes=1 << 20, extent_nbytes=64 << 10)  # 256 pages
    parts = [Pages("concurrent", tp_rank=rank, tp_size=2) for rank in range(2)]
    over = threading.Event()
    readers = [Reader() for _ in range(2)]

    def write(part: Pages, client: Client) -> None:
        for turn in range(60):
            part.put(client, part.keys(*range(turn * 5, turn * 5 + 12)))
            client.remove(part.namespace, part.keys(turn * 5))

    def read(reader: Reader) -> None:
        while not over.is_set():
            reader.poll(node)
            time.sleep(0.001)

    writers = [threading.Thread(target=write, args=(part, connect(node))) for part in parts]
    reading = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in (*writers, *reading):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    for thread in reading:
        thread.join()
    client = connect(node)
    there = [{page.prefix_hash for page in client.list_pages(part.namespace)} for part in parts]
    for reader in (*readers, Reader()):
        assert reader.catch_up(node) == {block_part(parts[0].namespace).id: there[0] & there[1]}
