"""Forgetting a tenant erases its pages from RAM and its rows and keys from disk, and keeps others.

A plain disk may keep the bytes of its pages, and the reply says so. On an encrypted disk, their key
is destroyed.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import Nodes, Pages
from locked import key_file, pieces
from memory_search import found, found_in

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.results import ForgetResult
from node.memory.promotion import parts_wanted
from node.server import Node

MIB = 1 << 20
SIZES = {
    **{
        "ram_nbytes": 8 * MIB,
        "extent_nbytes": MIB,
        "disk_nbytes": 16 * MIB,
        "disk_extent_nbytes": MIB,
    },
    "batch_nbytes_max": 4 * MIB,
}
SECRETS = [b"a secret model", b"a secret salt"]
Counts = tuple[int, ...]


@pytest.fixture(params=["plain", "encrypted"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a node with a plain or an encrypted disk."""
    if request.param == "encrypted":
        return {**SIZES, "encrypt_key_file": key_file(tmp_path / "key")}
    return SIZES


def tenant_pages(make_pages: type[Pages], tenant: str, nbytes: int = 8192) -> Any:
    return make_pages("a secret model", nbytes, salt="a secret salt", tenant=tenant)


def in_ram(node: Node, needles: Iterable[bytes]) -> list[bytes]:
    return found(bytes(node.arena.view(0, node.arena.nbytes)), needles)


@pytest.mark.parametrize("nbytes", [4096, 8192 + 5, 300_000])
def test_forget_erases_one_tenant_and_keeps_the_others(
    nodes: Nodes, settings: dict[str, Any], nbytes: int
) -> None:
    node = nodes.start(**settings)
    client = nodes.connect(node)
    gone, kept = tenant_pages(Pages, "gone", nbytes), Pages("kept", nbytes, tenant="kept")
    keys = gone.keys(*range(8))
    for pages in (gone, kept):
        pages.put(client, keys[:6], durable=True)
    gone.put(client, keys[6:])
    assert in_ram(node, pieces(gone, keys))
    reply = client.forget("gone")
    assert (reply.namespaces, reply.pages, reply.left, list(reply.why)) == (1, 8, 0, [])
    encrypted = "encrypt_key_file" in settings
    assert (reply.keys_destroyed, reply.plain_disk) == (encrypted, not encrypted)
    assert reply.ram_nbytes == 8 * node.tier.namespace(kept.digest).slot_nbytes
    assert not in_ram(node, pieces(gone, keys))
    assert not found_in(nodes.data_dir / "rows", SECRETS)
    if encrypted:
        assert not found_in(nodes.data_dir, pieces(gone, keys))
    assert gone.digest not in {namespace.digest for namespace, _ in client.namespaces()}
    assert kept.get(client, keys[:6]) == [True] * 6
    kept.drop_from_ram(node)
    assert kept.get(client, keys[:6]) == [True] * 6
    assert gone.get(client, keys) == [False] * 8
    node = nodes.restart(node, **settings)
    client = nodes.connect(node)
    assert kept.get(client, keys[:6]) == [True] * 6
    assert gone.get(client, keys) == [False] * 8
    assert not found_in(nodes.data_dir / "rows", SECRETS)


def test_forget_erases_pages_too_large_for_this_configuration(
    nodes: Nodes, settings: dict[str, Any]
) -> None:
    """Forget also erases a namespace that the node does not open because its extents are smaller
    now.
    """
    node = nodes.start(**settings)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone", 300_000)
    keys = gone.keys(*range(4))
    gone.put(client, keys, durable=True)
    node = nodes.restart(node, **{**settings, "extent_nbytes": 256 << 10})
    client = nodes.connect(node)
    assert gone.digest not in {namespace.digest for namespace, _ in client.namespaces()}
    assert found_in(nodes.data_dir / "rows", SECRETS) or "encrypt_key_file" in settings
    reply = client.forget("gone")
    assert (reply.namespaces, reply.left) == (1, 0)
    assert not found_in(nodes.data_dir / "rows", SECRETS)
    node = nodes.restart(node, **settings)
    assert gone.get(nodes.connect(node), keys) == [False] * 4


def page_ends(pages: Pages, keys: list[bytes]) -> list[bytes]:
    """Return the last 64 bytes of each page, which lie beyond a shorter page in the same slot."""
    return [pages.content(key)[-64:] for key in keys]


def test_rest_of_a_slot_is_not_written_to_disk(nodes: Nodes) -> None:
    node = nodes.start(**SIZES)
    client = nodes.connect(node)
    first, second = tenant_pages(Pages, "gone", 8192), Pages("kept", 4097, tenant="kept")
    keys = first.keys(*range(4))
    node.disk.stop_after_error("so that the first pages are in RAM only")
    first.put(client, keys)
    client.remove_namespace(first.namespace)
    second.put(client, keys)
    assert in_ram(node, page_ends(first, keys))
    client.recover()
    client.flush()
    second.drop_from_ram(node)
    assert second.get(client, keys) == [True] * 4
    assert not found_in(nodes.data_dir, page_ends(first, keys))


def test_destroyed_key_is_nowhere_on_disk(nodes: Nodes, tmp_path: Path) -> None:
    """After forget, the namespace's key and row are nowhere on disk.

    An earlier copy of the disk's bytes is then useless even with the operator's key.
    """
    settings = {**SIZES, "encrypt_key_file": key_file(tmp_path / "key")}
    node = nodes.start(**settings)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone")
    gone.put(client, gone.keys(1), durable=True)
    # After a restart, the row is in a file that RocksDB does not rewrite by itself
    node = nodes.restart(node, **settings)
    client = nodes.connect(node)
    spaces = node.disk._index.namespace_ids
    number = spaces.known(gone.digest)
    page_key, row = spaces.keys[number], dict(node.disk.rows.namespaces())[number]
    assert found_in(nodes.data_dir / "rows", [row])
    assert spaces._vault.unwrap(b"N" + number.to_bytes(2, "big"), row)[0] == page_key
    assert client.forget("gone").keys_destroyed == 1
    assert not found_in(nodes.data_dir, [row, row[:40], page_key])
    gone.put(client, gone.keys(1), durable=True)
    assert spaces.keys[spaces.known(gone.digest)] != page_key


def test_put_in_progress_stores_nothing_and_the_next_put_does(
    nodes: Nodes, settings: dict[str, Any]
) -> None:
    node = nodes.start(**settings)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone")
    one, two, three = gone.keys(1, 2, 3)
    gone.put(client, [one], durable=True)
    reservation = node.tier.reserve(gone.digest, [two], gone.nbytes)
    (page,) = reservation.pages
    node.arena.view(page.offset, gone.nbytes)[:] = gone.content(two)
    forgotten: list[ForgetResult] = []
    call = threading.Thread(target=lambda: forgotten.append(client.forget("gone", timeout_s=30.0)))
    call.start()
    try:
        while page not in node.tier._unwanted:
            threading.Event().wait(0.01)
        call.join(0.3)
        assert call.is_alive(), "the slot of the put in progress can not be zeroed yet"
    finally:
        node.tier.commit(reservation, [bytes(16)])
        call.join()
    assert (forgotten[0].pages, forgotten[0].left) == (1, 0)
    assert not in_ram(node, pieces(gone, [one, two]))
    assert gone.get(client, [one, two]) == [False, False]
    gone.put(client, [three], durable=True)
    assert gone.get(client, [three]) == [True]


def test_page_removed_before_its_commit_is_not_offered_to_the_disk(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page removed before its commit is not offered to the disk.

    Otherwise the writer might store it before the commit drops it.
    """
    node = nodes.start(**SIZES)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone")
    gone.put(client, gone.keys(1))
    offered: list[bytes] = []
    with monkeypatch.context() as patch:  # a stop of the node would offer the page in vain
        patch.setattr(
            node.disk,
            "offer",
            lambda pages, urgent: offered.extend(p.prefix_hash for p in pages) or 0,
        )
        reservation = node.tier.reserve(gone.digest, gone.keys(2, 3), gone.nbytes)
        node.tier.remove(gone.digest, gone.keys(2))
        node.tier.commit(reservation, [bytes(16)] * 2)
    assert offered == gone.keys(3)


def test_slot_still_being_read_is_reported_as_left(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.erasure.BUSY_S", 0.2)
    node = nodes.start(**SIZES)
    client = nodes.connect(node)
    gone, kept = tenant_pages(Pages, "gone"), Pages("kept", tenant="kept")
    keys = gone.keys(1, 2)
    held = []
    for pages in (gone, kept):
        pages.put(client, keys, durable=True)
        held += filter(None, node.tier.acquire(pages.digest, keys[:1], False, pages.nbytes).pages)
    try:
        reply = client.forget("gone")
        assert (reply.left, list(reply.why)) == (
            1,
            ["1 slots of RAM are still being read or written"],
        )
        assert in_ram(node, pieces(gone, keys[:1]))
        assert not in_ram(node, pieces(gone, keys[1:]))
    finally:
        node.tier.release(held)
    assert not in_ram(node, pieces(gone, keys)), "the last reader's release zeroes it"
    assert client.forget("gone").left == 0
    assert kept.get(client, keys) == [True, True]


def test_failing_disk_is_an_error_and_pages_stay_removed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start(**SIZES)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone")
    keys = gone.keys(1, 2)
    gone.put(client, keys, durable=True)

    def broken(needles: Any) -> int:
        raise OSError(5, "purge")

    monkeypatch.setattr(node.disk.rows, "purge", broken)
    with pytest.raises(Exhausted, match="removed, and zeroed in RAM, but the disk fails"):
        client.forget("gone")
    monkeypatch.undo()
    assert node.disk.stop_reason
    assert not in_ram(node, pieces(gone, keys))
    client.recover()
    assert gone.get(client, keys) == [False, False]
    assert client.forget("gone").left == 0
    assert not found_in(nodes.data_dir / "rows", SECRETS)


def test_forget_on_a_stopped_disk_erases_ram(nodes: Nodes) -> None:
    node = nodes.start(**SIZES)
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone")
    gone.put(client, gone.keys(1, 2), durable=True)
    node.disk.stop_after_error("by this test")
    with pytest.raises(Exhausted, match="stopped"):
        client.forget("gone")
    assert not in_ram(node, pieces(gone, gone.keys(1, 2)))
    client.recover()
    assert client.forget("gone").left == 0
    assert not found_in(nodes.data_dir / "rows", SECRETS)


def test_parts_in_use_are_zeroed_by_their_last_reader(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forget also erases parts that are being read from disk, which no key leads to."""
    monkeypatch.setattr("node.serving.erasure.BUSY_S", 0.2)
    node = nodes.start(**{**SIZES, "extent_nbytes": 4 * MIB, "disk_extent_nbytes": 4 * MIB})
    client = nodes.connect(node)
    gone = tenant_pages(Pages, "gone", 4 * MIB)
    (key,) = gone.keys(1)
    gone.put(client, [key], durable=True)
    gone.drop_from_ram(node)
    parts = parts_wanted(node.tier.namespace(gone.digest), [(0, 9)])
    acquired = node.tier.acquire(gone.digest, [key], False, 9, parts)
    assert node.tier.promotion.read(acquired, lambda: False) == acquired.pages
    (page,) = acquired.pages
    assert page is not None
    head = [gone.content(key)[:64]]
    assert in_ram(node, head)
    assert client.forget("gone").left == 1
    node.tier.release([page])
    assert not in_ram(node, head)


@pytest.mark.parametrize("wire", ["bulk", "grpc", "shm"])
def test_empty_tenant_is_refused_and_unknown_tenant_has_no_pages(
    nodes: Nodes, pages: Pages, wire: str
) -> None:
    client = nodes.connect(nodes.start(), wire)
    pages.put(client, pages.keys(1))
    with pytest.raises(InvalidRequest, match="no tenant is named"):
        client.forget("")
    reply = client.forget("nobody")
    assert (reply.namespaces, reply.pages, reply.left) == (0, 0, 0)
    assert pages.get(client, pages.keys(1)) == [True]


def test_pages_are_served_while_a_tenant_is_forgotten(
    nodes: Nodes, settings: dict[str, Any]
) -> None:
    node = nodes.start(**settings)
    client = nodes.connect(node)
    kept = Pages("kept", tenant="kept")
    keys, over = kept.keys(*range(100)), threading.Event()
    kept.put(client, keys[:50], durable=True)
    wrong: list[Any] = []

    def work() -> None:
        other = nodes.connect(node)
        for number in range(50, 100):
            kept.put(other, keys[number : number + 1])
            if kept.get(other, keys[number - 50 : number + 1]) != [True] * 51:
                wrong.append(number)
        over.set()

    worker = threading.Thread(target=work)
    worker.start()
    rounds = 0
    while not over.is_set() or not rounds:
        gone = tenant_pages(Pages, "gone")
        gone.put(client, gone.keys(*range(20)))
        assert client.forget("gone").left == 0
        assert not in_ram(node, pieces(gone, gone.keys(*range(20))))
        rounds += 1
    worker.join()
    assert not wrong
    assert kept.get(client, keys) == [True] * 100
    client.flush()
    kept.drop_from_ram(node)
    assert kept.get(client, keys) == [True] * 100
