"""Define the tiers below RAM, from which pages are read and to which they are written.

    RAM --misses--> disk --misses--> other members --misses--> ...

    find     keys  -> sources     without the RAM tier's lock, so it may wait
             slots are taken under the lock, for pages that RAM still lacks
    read     loads -> bytes       without the lock; each page is verified and reported on arrival
    offer    pages -> taken       write-behind: under the lock, so it never waits

Tiers are asked in order, each for the keys that the previous ones lack. A source has whatever its
tier needs to read the page. An error of a tier is a miss there, never an error of the request:
`find` leaves the key out, `read` does not report the page as intact, and the next tier is asked.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from kvstore.deadline import Deadline
from kvstore.keys import Namespace
from node.memory.changes import ChangeRing
from node.memory.page import NamespaceIndex, Page, State


class Query(NamedTuple):
    """Keys that a tier is asked for.

    `touch`: the query counts as a use. `is_lookup`: its caller reads no page now.
    """

    namespace: Namespace
    prefix_hashes: Sequence[bytes]  # each once
    deadline: Deadline
    touch: bool = False
    is_lookup: bool = False


class Source(NamedTuple):
    """A page that a tier has.

    `locator` is opaque. `is_copy`: other members own the page, so it is a copy here.
    """

    tier: LowerTier
    locator: Any
    is_copy: bool = False


class Load(NamedTuple):
    """A page with a slot, and the source of its bytes."""

    page: Page
    source: Source


class LowerTier(abc.ABC):
    """A tier below RAM. Thread-safe.

    `name` is its name in metrics. A tier that `reads_parts` can fill pages of a `PartialPage`.
    """

    name: ClassVar[str]
    reads_parts: ClassVar[bool] = False

    def is_asked(self, near: bool) -> bool:
        """Return whether to ask this tier at all.

        `near`: the request wants pages of other members, too.
        """
        return True

    @abc.abstractmethod
    def find(self, query: Query) -> dict[bytes, Source]:
        """Return where the pages of these keys are, as far as found until the deadline.

        A source stays readable until it is passed to `read` or `release`. No lock is held.
        """

    @abc.abstractmethod
    def read(
        self,
        loads: Sequence[Load],
        arrived: Callable[[Page], None],
        has_left: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        """Fill the pages' slots, and their `checksum`, `leaves` and `expiry_s`.

        No lock is held.

        `arrived` is called, by any thread, for each page whose bytes are intact; the others are
        misses. `has_left` tells that the caller has left. After this returns or raises, no thread
        writes to a slot and all sources are released.
        """

    # Most tiers keep nothing for their sources.
    def release(self, sources: Iterable[Source]) -> None:  # noqa: B027
        """Release sources that are not read.

        May be called under the RAM tier's lock.
        """

    def is_there(self, source: Source) -> bool:
        """Return whether the page was not removed since it was found.

        Called under the RAM tier's lock.
        """
        return True

    @property
    def stalled(self) -> bool:
        """Return whether a running read may hang, so that waiting for it is useless."""
        return False

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        """Take pages for writing; return how many, from the first on, were taken.

        They stay held until the tier releases them. It may request the rest later, unless this is
        urgent. Called under the RAM tier's lock.
        """
        return 0


class LowerTierInfo(NamedTuple):
    """A page of the local tier; times in seconds."""

    checksum: bytes
    idle_s: int
    pin_ttl_s: int
    ttl_s: int


class LocalTier(LowerTier):
    """A tier inside this node, such as the disk.

    Its lookups and pins run under the RAM tier's lock, so they must not wait. This base class has
    no pages: a node without a disk uses it.
    """

    name = "disk"

    def is_asked(self, near: bool) -> bool:
        """Return False: there is nothing to ask."""
        return False

    def find(self, query: Query) -> dict[bytes, Source]:
        """Return nothing."""
        return {}

    def read(
        self,
        loads: Sequence[Load],
        arrived: Callable[[Page], None],
        has_left: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        """Read nothing."""
        assert not loads, "nothing to read"

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return False for each page."""
        return [False] * len(prefix_hashes)

    def safe(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return which of the pages survive power loss."""
        return [False] * len(prefix_hashes)

    def touch(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> None:
        """Mark the pages as used, a chain's head first."""

    def info(self, digest: bytes, prefix_hash: bytes) -> LowerTierInfo | None:
        """Return None: no page is here."""
        return None

    # Nothing is here to watch.
    def watch(self, changes: ChangeRing | None) -> None:
        """Note in this ring which pages go; None: no longer."""

    def list_hashes(self, digest: bytes, key_prefix: bytes, after: bytes) -> Iterator[bytes]:
        """Yield prefix hashes in order.

        Called without any lock.
        """
        return iter(())

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Forget pages.

        Return True for each that was there.
        """
        return [False] * len(prefix_hashes)

    def remove_namespace(self, digest: bytes) -> int:
        """Forget all pages of a namespace.

        Return how many there were. Called without any lock.
        """
        return 0

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int) -> list[bool]:
        """Keep pages for `ttl_s`; return True for each that exists.

        0 ends pins: True for each that was pinned.

        Raises Exhausted, and pins none, if too much would be pinned.
        """
        return [False] * len(prefix_hashes)


def add_below(
    tier: LocalTier,
    live: Callable[[NamespaceIndex, bytes], Page | None],
    index: NamespaceIndex,
    prefix_hashes: Sequence[bytes],
    pages: list[Page | None],
    present: list[bool],
) -> list[int]:
    """Correct `present` for pages with a time to live, or in the local tier.

    Return the positions of those that are in the local tier only. `pages`: those that RAM has in
    any state; pages that are found to be over are taken out.
    """
    missing = [i for i, here in enumerate(present) if not here]
    found = tier.present(index.digest, [prefix_hashes[i] for i in missing])
    only = []
    for i, is_below in zip(missing, found, strict=True):
        page = pages[i]
        if is_below:
            present[i] = True
            if page is None or page.state is not State.VISIBLE:
                only.append(i)
        elif page is not None:
            present[i] = live(index, prefix_hashes[i]) is not None
            pages[i] = index.pages.get(prefix_hashes[i])
    return only
