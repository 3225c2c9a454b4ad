"""What a writer has between asking and committing, and a reader until it releases."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from node.ram.namespace import NamespaceIndex
from node.ram.page import Page


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
    prefix_hashes: list[bytes]
    verdicts: list[int]
    pages: list[Page]
    chain: list[Page]


class Acquired(NamedTuple):
    """`pages`: one or None per key, all held. `loads`: those of them that the caller must read from
    the tier below, with the record to read, before it, or anyone, may look at them."""

    pages: list[Page | None]
    loads: list[tuple[Page, int]]
