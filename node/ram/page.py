"""What the node knows about one page, apart from its bytes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

from kvstore.keys import Namespace
from node.ram.accounts import Account
from node.ram.counters import Counters


class Space(Protocol):
    """What a page needs of its namespace (`node.ram.namespace.NamespaceIndex`)."""

    value: Namespace
    digest: bytes
    page_nbytes: int
    slot_nbytes: int
    account: Account[Any]  # of its tenant; its pool is a `node.ram.pool.Pool`
    pages: dict[bytes, Page]
    counters: Counters

    def seed(self, prefix_hash: bytes) -> int: ...

    def drop(self, page: Page) -> None: ...


class Waiting(Protocol):
    """Where pages wait for their turn to go (`node.ram.pool.Pool`)."""

    def came_back(self, page: Page) -> None: ...

    def withdraw(self, page: Page) -> None: ...

    def give_back(self, page: Page) -> None: ...

    def __contains__(self, page: Page) -> bool: ...


class Order(Protocol):
    """In which it has a place there (`node.ram.sizes.SizeOrder`)."""

    pool: Waiting

    def use(self, pages: Iterable[Page]) -> None: ...


class State(enum.IntEnum):
    """reserve            commit              remove, while held
    --------> WRITING --------> VISIBLE -------------------------> DOOMED
                 | abort         ^ | remove, evict                    | last release
                 v               | v                                  v
                gone    LOADING -+ gone                              gone
                        (from disk, from another node; fails: DOOMED)
    """

    WRITING = 0  # a writer owns the slot; nobody else may look
    VISIBLE = 1
    DOOMED = 2  # nobody can find it (any more), but the slot waits for its readers
    LOADING = 3  # on its way from the tier below, or from another node; readers may wait for it


class Page:
    """A slot of the RAM tier and what is in it. Slots, not a dict: 200,000 of these must be small.

    `holds` counts reads in progress: a held page keeps its slot whatever happens. `used_ms` and
    `stored_ms` are the tier's clock; pages of one batch share the int object.
    """

    __slots__ = (
        "checksum",
        "expiry_s",
        "holds",
        "is_copy",
        "leaves",
        "namespace",
        "newer",
        "offset",
        "older",
        "order",
        "prefix_hash",
        "state",
        "stored_ms",
        "used_ms",
    )

    def __init__(self, namespace: Space, prefix_hash: bytes, now_ms: int, is_copy: bool = False) -> None:
        self.namespace = namespace
        self.prefix_hash = prefix_hash
        self.offset = -1
        self.checksum = b""
        self.leaves = b""  # only of a page that has several (`kvstore.checksum`)
        self.expiry_s = 0  # since the epoch; 0: no time to live
        self.state = State.WRITING
        self.holds = 0
        self.is_copy = is_copy  # other members of the cluster own it
        self.stored_ms = self.used_ms = now_ms
        self.order: Order | None = None  # among those that may go
        self.older: Page | None = None
        self.newer: Page | None = None
