"""Namespaces on disk keep their pages over restarts, even when their numbers and rows change."""

from typing import Any

import pytest
from disk_nodes import Nodes, Pages

from kvstore.errors import Exhausted
from kvstore.messages import namespace_message
from node.disk.index import NamespaceIds
from node.disk.page_table import PageTable


def test_pages_of_a_namespace_with_a_new_number_survive_a_restart(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace that was dropped empty and came back under another number keeps durable pages.

    Its old row, with the old number, must not win after a restart.
    """
    monkeypatch.setattr("node.disk.index.KEPT", 4)
    node = nodes.start()
    client = nodes.connect(node)
    spaces = [Pages("salted", salt=str(number)) for number in range(5)]
    for pages in spaces[:4]:
        pages.put(client, pages.keys(1), durable=True)
        client.remove_namespace(pages.namespace)
    back = [spaces[4], spaces[3]]  # spaces[4] displaced an empty one and got number 1
    for pages in back:
        pages.put(client, pages.keys(1, 2), durable=True)
    node = nodes.restart(node)
    client = nodes.connect(node)
    for pages in back:
        assert pages.on_disk(node, pages.keys(1, 2)) == [True, True]
        assert pages.get(client, pages.keys(1, 2)) == [True, True]
    rows = list(node.disk.rows.namespaces())
    assert len({message for _, message in rows}) == len(rows) == 2, "one row each"


def test_namespace_with_failed_rows_survives_a_restart(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces survive if the batch with their number failed but reached the log all the same."""
    monkeypatch.setattr("node.disk.index.KEPT", 2)
    node = nodes.start()
    client = nodes.connect(node)
    first, second, third = (Pages("salted", salt=str(number)) for number in range(3))
    write = node.disk.rows.write

    def fail_late(*args: Any) -> None:
        write(*args)
        raise OSError("the log could not be synced")

    first.put(client, first.keys(1), durable=True)
    client.remove_namespace(first.namespace)
    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "write", fail_late)
        with pytest.raises(Exhausted):
            second.put(client, second.keys(1), durable=True)
    client.remove_namespace(second.namespace)
    client.recover()
    for pages in (third, second, first):
        pages.put(client, pages.keys(1), durable=True)
    node.disk.stop_after_error("so that the stop does not tidy up")
    node = nodes.restart(node)
    client = nodes.connect(node)
    for pages in (first, second, third):
        assert pages.get(client, pages.keys(1)) == [True]


def test_second_row_of_a_namespace_does_not_change_its_number(pages: Pages) -> None:
    spaces = NamespaceIds(PageTable(4096, 4096).accounts.of)
    row = namespace_message(pages.namespace).SerializeToString()
    assert spaces.restore(1, row) == ""
    assert "second" in spaces.restore(2, row)
    assert (spaces.known(pages.digest), list(spaces.values)) == (1, [1])


def listed(client: Any) -> set[bytes]:
    return {namespace.digest for namespace, _ in client.namespaces()}


def test_namespaces_with_pages_are_listed_after_many_empty_ones(
    nodes: Nodes,
) -> None:
    node = nodes.start(namespaces_max=8)
    client = nodes.connect(node)
    kept = [Pages("kept", salt=str(number)) for number in range(2)]
    for pages in kept:
        pages.put(client, pages.keys(1), durable=True)
    for number in range(20):
        gone = Pages("gone", salt=str(number))
        gone.put(client, gone.keys(1), durable=True)
        client.remove_namespace(gone.namespace)
    client.flush()
    node = nodes.restart(node, namespaces_max=8)
    client = nodes.connect(node)
    assert listed(client) >= {pages.digest for pages in kept}
    for pages in kept:
        assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == pages.keys(1)
        assert pages.get(client, pages.keys(1)) == [True]
    client.flush()
    assert len(list(node.disk.rows.namespaces())) == 2, "empty namespaces left rows behind"


def test_namespaces_with_pages_are_served_beyond_a_lowered_limit(
    nodes: Nodes,
) -> None:
    node = nodes.start(namespaces_max=16)  # half for one peer
    client = nodes.connect(node)
    spaces = [Pages("salted", salt=str(number)) for number in range(8)]
    for pages in spaces:
        pages.put(client, pages.keys(1), durable=True)
    node = nodes.restart(node, namespaces_max=3)
    client = nodes.connect(node)
    assert listed(client) == {pages.digest for pages in spaces}
    for pages in spaces:
        assert pages.get(client, pages.keys(1)) == [True]
    another = Pages("one more")
    with pytest.raises(
        Exhausted, match=r"8 namespaces of 127\.0\.0\.1 with pages are open, .* allowed are 2 "
    ):
        another.put(client, another.keys(1))


def test_namespaces_with_long_descriptions_are_all_listed_after_a_restart(nodes: Nodes) -> None:
    """A namespace with pages is listed although the rows of empty ones exceed the limit of
    descriptions.
    """
    node = nodes.start()
    client = nodes.connect(node)
    kept = Pages("kept", tenant="k" * 1000)
    kept.put(client, kept.keys(1), durable=True)
    for number in range(30):
        gone = Pages("gone", tenant=f"{number:01000d}", revision="r" * 1000, salt="s" * 1000)
        gone.put(client, gone.keys(1), durable=True)
        client.remove_namespace(gone.namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.memory.page.DESCRIPTIONS_NBYTES_MAX", 20_000)
        node = nodes.restart(node)
        client = nodes.connect(node)
        assert kept.digest in listed(client)
        assert kept.get(client, kept.keys(1)) == [True]


def test_page_read_during_the_removal_of_its_namespace_does_not_stay(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page read from disk while its namespace is removed does not stay in RAM.

    The read happens after the removal has gone through RAM and before it goes through the disk.
    """
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    below = node.disk.remove_namespace

    def remove(digest: bytes) -> int:
        assert pages.get(client, keys[:2]) == [True] * 2
        return below(digest)

    monkeypatch.setattr(node.disk, "remove_namespace", remove)
    assert nodes.connect(node).remove_namespace(pages.namespace) == 4
    assert pages.get(client, keys) == [False] * 4
    client.flush()
    assert pages.get(nodes.connect(nodes.restart(node)), keys) == [False] * 4
