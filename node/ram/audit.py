"""Whether the RAM tier's books agree: what its counters say, its namespaces name and its slots hold."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.keys import short
from node.ram.namespace import NamespaceIndex
from node.ram.page import State
from node.slots import SlotAllocator


class Counted(NamedTuple):
    """Pages, as the tier's counters have them."""

    writing: int
    visible: int
    held: int


def violations(namespaces: Sequence[NamespaceIndex], slots: SlotAllocator, counted: Counted) -> list[str]:
    """What disagrees; empty if all is well. The caller has the tier's lock."""
    pages = [page for index in namespaces for page in index.pages.values()]
    owned = [page for block in slots.blocks() for page in block.owners if page is not None]
    doomed = [page for page in owned if page.state is State.DOOMED]
    writing = sum(page.state in (State.WRITING, State.LOADING) for page in pages)
    found = Counted(writing, len(pages) - writing, sum(page.holds > 0 for page in owned))
    wrong = [
        f"{name}: {said} counted, {is_} found"
        for name, said, is_ in (
            *zip(Counted._fields, counted, found, strict=True),
            ("slots", len(owned), len(pages) + len(doomed)),
        )
        if said != is_
    ]
    wrong += [
        f"page {short(page.prefix_hash)} is forgotten, unread, but keeps its slot" for page in doomed if not page.holds
    ]
    if len({id(page) for page in owned}) != len(owned):
        wrong.append("a page owns two slots")
    return wrong
