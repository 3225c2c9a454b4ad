"""Define what the client's calls take and return, apart from pages.

Replies of nodes, such as a status, are in `kvstore.results.replies`. They are imported when one is
first named: their generated methods take 35 ms, which engines need not spend.
"""

import enum
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.results.replies import *  # noqa: F403


class PutOutcome(enum.Enum):
    """Outcome of a put for one page."""

    STORED = pb.WRITE
    EXISTS = pb.EXISTS  # was stored already; counts as a use
    BUSY = pb.BUSY  # another writer is storing it now
    FULL = pb.FULL  # the node has no space that it may free
    AWAY = -1  # in a cluster: no owner of the key could be reached

    @property
    def kept(self) -> bool:
        """Return whether the store has the page or is about to."""
        return self in (PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BUSY)


class Tier(enum.IntEnum):
    """Tell where a lookup found a page; `PEER`: a near node found it at another member."""

    RAM = 1
    DISK = 2
    PEER = 3


@dataclass(frozen=True)
class LookupResult:
    """Result of a lookup. `prefix_pages`: number of leading keys that are stored.

    `present`: one bool per key. `tiers`: one byte per key, a `Tier`, or 0 if it is not stored;
    empty if all pages are in RAM.
    """

    prefix_pages: int
    present: tuple[bool, ...]
    tiers: bytes = b""


ACK_ONE, ACK_ALL = "one", "all"


@dataclass(frozen=True)
class Keep:
    """Time to live and durability of the pages of a put.

    `ttl_s`: seconds after which new pages expire; 0: pages stay until they are evicted. `durable`:
    the put returns when the pages survive `kill -9` and power loss; needs a node with a data
    directory. `ack`: in a cluster with replicas, it returns when "one" or "all" of a page's owners
    have it. With `durable` and "all" the pages survive at all owners.
    """

    ttl_s: float = 0.0
    durable: bool = False
    ack: str = ACK_ONE

    def __post_init__(self) -> None:
        if self.ack not in (ACK_ONE, ACK_ALL):
            raise InvalidRequest(f"ack={self.ack!r} must be one of {ACK_ONE}, {ACK_ALL}")

    @property
    def needs_ack(self) -> bool:
        """Return whether the put waits for more than one node's RAM."""
        return self.durable or self.ack == ACK_ALL

    @property
    def promised(self) -> bool:
        """Return `needs_ack`, under its former name."""
        warnings.warn("Keep.promised is now Keep.needs_ack", DeprecationWarning, stacklevel=2)
        return self.needs_ack


KEEP_WHILE_SPACE = Keep()


class VerifyResult(NamedTuple):
    """Pages that were intact, that were corrupt and are removed, or that were absent."""

    intact: int
    dropped: int
    absent: int


class ClientStats(NamedTuple):
    """Counters since the client was made.

    `forged_pages`: pages that matched their checksum, but had no valid HMAC.
    """

    connects: int
    failures: int
    corrupt_pages: int
    forged_pages: int = 0


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.replies"), name)
