"""What a writer has between asking and committing, and a reader until it releases."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State


class Verdict(enum.IntEnum):
    """Answer to a writer, per key; values as in the PutVerdict message."""

    WRITE = 1
    EXISTS = 2
    BUSY = 3
    FULL = 4


@dataclass
class Reservation:
    """`pages` are to be written, head first; `chain` also has those that exist already."""

    namespace: NamespaceIndex
    prefix_hashes: Sequence[bytes]
    verdicts: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    chain: list[Page] = field(default_factory=list)
    is_full: bool = False  # there is no room for one more

    def write(self, pages: Sequence[Page]) -> None:
        """The next keys are those of new pages, some of `pages`."""
        self.verdicts += [Verdict.WRITE] * len(pages)
        self.chain += pages

    def refuse(self, page: Page | None, is_below: bool) -> None:
        """The next key is stored already, in RAM or only below, is being written, or has no room."""
        if page is None:
            self.verdicts.append(Verdict.EXISTS if is_below else Verdict.FULL)
        elif page.state is State.VISIBLE:
            self.verdicts.append(Verdict.EXISTS)
            self.chain.append(page)
        else:
            self.verdicts.append(Verdict.BUSY)

    def count(self) -> None:
        """Tells the namespace's counters what is not to be written."""
        refused = map(self.verdicts.count, (Verdict.EXISTS, Verdict.BUSY, Verdict.FULL))
        self.namespace.counters.count_put(*refused)

    def count_stored(self) -> None:
        """Tells them what was written."""
        counters = self.namespace.counters
        counters.pages_put += len(self.pages)
        counters.nbytes_put += len(self.pages) * self.namespace.page_nbytes


class Acquired(NamedTuple):
    """`pages`: one or None per key, all held. `loads`: those of them that the caller must read from
    the tier below, with the record to read, before it, or anyone, may look at them. `in_part`: those of these
    that nobody else can find, because only parts of them are read. `fetched`: those that the caller must fetch
    from another node."""

    pages: list[Page | None]
    loads: list[tuple[Page, int]]
    in_part: dict[bytes, Page]
    fetched: list[Page]
