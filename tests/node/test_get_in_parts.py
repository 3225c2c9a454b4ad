"""Gets over shared memory that are answered in parts, while the node still reads other pages."""

import os
from pathlib import Path
from typing import Any

import pytest
from fleet import KB16, owned, view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect, StartNode
from waiting import wait_until

import kvstore.transports.shm as shm_wire
from kvstore import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from node.server import Node
from node.serving.session import ReadyRun
from node.serving.shm import ShmConnection

PAGES = Pages("parts", KB16)
KEYS = PAGES.keys(*range(24))


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Send parts of single pages; return those that were sent."""
    sent: list[Any] = []
    send = ShmConnection.send_soon

    def recorded(self: ShmConnection, op: str, reply: Any) -> None:
        sent.append(reply)
        send(self, op, reply)

    monkeypatch.setattr("node.serving.session.PART_NBYTES", 1)
    monkeypatch.setattr(ShmConnection, "send_soon", recorded)
    return sent


def nothing_held(node: Node) -> None:
    wait_until(lambda: node.tier.held_count == 0)
    assert node.check() == []


def theirs(nodes: list[Node]) -> list[bytes]:
    """Return the keys that the first node does not own."""
    mine = owned(view_of(nodes), PAGES, KEYS, "n0")
    return [key for key in KEYS if key not in mine]


def test_pages_of_other_members_come_in_parts(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, parts: list[Any]
) -> None:
    """Misses, pages that the node has and those of two members, in any order."""
    PAGES.put(far(cluster), KEYS[:9] + KEYS[10:])
    client = near(cluster)
    assert PAGES.get(client, KEYS) == [True] * 9 + [False] + [True] * 14
    assert sum(len(part.hits) for part in parts) > 1
    assert all(part.more for part in parts)
    nothing_held(cluster[0])
    parts.clear()
    assert PAGES.get(client, KEYS, prefix=True) == [True] * 9 + [False] * 15
    assert parts == []  # nothing was to be read


def test_client_that_asks_for_no_parts_gets_none(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, parts: list[Any]
) -> None:
    PAGES.put(far(cluster), KEYS)
    client = near(cluster)
    with client.open_get(PAGES.namespace, KEYS) as slots:
        assert [bytes(page) for page in slots.pages] == [PAGES.content(key) for key in KEYS]
    assert parts == []


def test_corrupt_page_between_others_is_a_miss(
    cluster: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    view = view_of(cluster)
    PAGES.put(far(cluster), KEYS)
    bad = owned(view, PAGES, KEYS, "n1")[2]
    PAGES.flip(cluster[1], bad)
    assert PAGES.get(near(cluster), KEYS) == [key != bad for key in KEYS]
    nothing_held(cluster[0])


def test_pages_from_disk_come_in_parts(
    start_node: StartNode, connect: Connect, tmp_path: Path, parts: list[Any]
) -> None:
    node = start_node(data_dir=str(tmp_path), disk_nbytes=16 << 20)
    client, more = connect(node, "shm"), PAGES.keys(*range(100, 400))
    for keys in (KEYS, more):  # more than the RAM takes
        PAGES.put(client, keys)
        client.flush()
    assert PAGES.get(client, KEYS) == [True] * len(KEYS)
    assert parts
    nothing_held(node)


def test_parts_that_the_socket_does_not_take_come_with_the_last_reply(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    PAGES.put(far(cluster), KEYS)
    client = near(cluster)
    for failing in (False, True):

        def send_now(self: FrameSocket, data: bytes, failing: bool = failing) -> bytes:
            if failing:
                raise OSError("no buffer")
            self.send(data[:5])
            return data[5:]

        with monkeypatch.context() as patch:
            patch.setattr(FrameSocket, "send_now", send_now)
            assert PAGES.get(client, KEYS) == [True] * len(KEYS)
        nothing_held(cluster[0])
        for key in theirs(cluster):
            cluster[0].tier.remove(PAGES.namespace.digest, [key])


def test_interrupt_between_parts_leaves_no_part_for_the_next_call(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    PAGES.put(far(cluster), KEYS)
    client, read_page, left = near(cluster), shm_wire._read_page, [3]

    def interrupted(*arguments: Any) -> bytes:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return read_page(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shm_wire, "_read_page", interrupted)
        with pytest.raises(KeyboardInterrupt):
            PAGES.get(client, KEYS)
    nothing_held(cluster[0])  # otherwise a page that the node gives up just now is a miss
    assert PAGES.get(client, KEYS[::-1]) == [True] * len(KEYS)
    nothing_held(cluster[0])


def test_error_after_parts_ends_the_call(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    PAGES.put(far(cluster), KEYS)
    client, reply, calls = near(cluster), ReadyRun.reply, [0]

    def fails_later(self: ReadyRun, pages: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise MemoryError
        return reply(self, pages)

    with monkeypatch.context() as patch:
        patch.setattr(ReadyRun, "reply", fails_later)
        with pytest.raises(KVStoreError, match="MemoryError"):
            PAGES.get(client, KEYS)
    assert PAGES.get(client, KEYS[::-1]) == [True] * len(KEYS)
    nothing_held(cluster[0])


def test_leading_pages_are_reported_once_and_the_last_key_never() -> None:
    sent: list[pb.GetReply] = []
    run = ReadyRun(sent.append, 1, lambda: 0)
    run._pages_min = 2

    class Made:
        expiry_s = 0

        def __init__(self, number: int) -> None:
            self.offset, self.checksum = number, b""

    pages: list[Any] = [Made(0), Made(1), None, Made(3), Made(4)]

    def ready(number: int) -> list[tuple[list[bool], list[int], bool]]:
        pages[number].checksum = os.urandom(16)
        run.some_ready(pages)
        found = [(part.hits[:], part.offsets[:], part.more) for part in sent]
        sent.clear()
        return found

    assert ready(1) == []
    assert ready(0) == [([True, True, False], [0, 1], True)]
    assert ready(4) == []
    assert ready(3) == []  # one alone is no part
    assert run.count == 3
    assert run.reply(pages[3:]).offsets == [3, 4]


def test_small_pages_are_not_looked_at_again_at_each_arrival() -> None:
    looks = 0

    class Seen(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    run, pages = ReadyRun(lambda reply: None, 1024, lambda: 0), Seen([None] * 1000)
    for _ in pages:
        run.some_ready(pages)
    assert looks < 3 * len(pages)
