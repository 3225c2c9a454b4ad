"""Define what the client's calls take and return, apart from pages."""

import enum
import warnings
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb


class PutOutcome(enum.Enum):
    """What became of one page of a put."""

    STORED = pb.WRITE
    EXISTS = pb.EXISTS  # was there already; counts as a use
    BUSY = pb.BUSY  # another writer is just storing it
    FULL = pb.FULL  # the node has no space it may free
    AWAY = -1  # of a cluster: none of the key's owners could be asked

    @property
    def kept(self) -> bool:
        """Return whether the store has the page or is about to."""
        return self in (PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BUSY)


@dataclass(frozen=True)
class LookupResult:
    """`prefix_pages`: leading keys that are stored.

    `present`: one bool per key.
    """

    prefix_pages: int
    present: tuple[bool, ...]


ACK_ONE, ACK_ALL = "one", "all"


@dataclass(frozen=True)
class Keep:
    """How long and how well the pages of a put are kept.

    `ttl_s`: seconds after which new pages are forgotten for certain, 0: whenever space runs out.
    `durable`: the put returns when they survive `kill -9` and power loss; needs a node with a data
    directory. `ack`: in a cluster with replicas it returns when "one" of a page's owners has it, or
    "all" of them; with both they survive at all of them.
    """

    ttl_s: float = 0.0
    durable: bool = False
    ack: str = ACK_ONE

    def __post_init__(self) -> None:
        if self.ack not in (ACK_ONE, ACK_ALL):
            raise InvalidRequest(f"ack={self.ack!r} must be one of {ACK_ONE}, {ACK_ALL}")

    @property
    def needs_ack(self) -> bool:
        """Return whether the put waits for more than one node having the pages."""
        return self.durable or self.ack == ACK_ALL

    @property
    def promised(self) -> bool:
        """Return `needs_ack`, under its former name."""
        warnings.warn("Keep.promised is now Keep.needs_ack", DeprecationWarning, stacklevel=2)
        return self.needs_ack


KEEP_WHILE_SPACE = Keep()


class VerifyResult(NamedTuple):
    """Pages whose copy at the node is good, was bad and is gone now, or is not there."""

    intact: int
    dropped: int
    absent: int


class ClientStats(NamedTuple):
    """Counts since the client was made.

    `forged_pages`: that matched their checksum and had not their seal.
    """

    connects: int
    failures: int
    corrupt_pages: int
    forged_pages: int = 0
