"""What a writer gets between asking and committing."""

import enum
from dataclasses import dataclass

from node.namespace import NamespaceIndex
from node.page import Page


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
    verdicts: list[int]
    pages: list[Page]
    chain: list[Page]
