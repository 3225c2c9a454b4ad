"""What the RAM tier asks of the tier below it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from node.memory.page import Page


class LowerTierInfo(NamedTuple):
    """A page of the tier below, in seconds."""

    checksum: bytes
    idle_s: int
    pin_ttl_s: int
    ttl_s: int


class LowerTier(Protocol):
    """Called under the RAM tier's lock, so nothing here waits; only `read` moves bytes, without it."""

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]: ...

    def safe(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Which of the pages survive power loss."""

    def touch(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> None: ...

    def info(self, digest: bytes, prefix_hash: bytes) -> LowerTierInfo | None: ...

    def list_hashes(self, digest: bytes, key_prefix: bytes, after: bytes) -> Iterator[bytes]:
        """In order; called without any lock."""

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]: ...

    def remove_namespace(self, digest: bytes) -> int: ...

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int) -> list[bool]:
        """True for each that is there. `ttl_s` 0 ends pins: True for each that was pinned. Raises Exhausted, and
        pins none, if too much would be pinned."""

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        """How many of the pages, from the first on, it takes; they stay held until it releases them.
        It may come back for the rest later, unless this is urgent."""

    def begin_read(self, digest: bytes, prefix_hash: bytes) -> int:
        """A record to `read`, 0 for a miss. Each must be read or given back by `end_read`."""

    def end_read(self, record: int) -> None: ...

    def read(self, record: int, page: Page) -> bool:
        """Fills the page's slot and sets its checksum; False if that can not be."""


class NoLowerTier:
    """No tier below: a node without a disk."""

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(prefix_hashes)

    def safe(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(prefix_hashes)

    def touch(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> None: ...

    def info(self, digest: bytes, prefix_hash: bytes) -> LowerTierInfo | None:
        return None

    def list_hashes(self, digest: bytes, key_prefix: bytes, after: bytes) -> Iterator[bytes]:
        return iter(())

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(prefix_hashes)

    def remove_namespace(self, digest: bytes) -> int:
        return 0

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int) -> list[bool]:
        return [False] * len(prefix_hashes)

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        return 0

    def begin_read(self, digest: bytes, prefix_hash: bytes) -> int:
        return 0

    def end_read(self, record: int) -> None:
        raise AssertionError("nothing was read")

    def read(self, record: int, page: Page) -> bool:
        raise AssertionError("nothing to read")
