"""Pinning pages, in RAM and below: a promise to keep them from eviction for a time."""

from collections.abc import Sequence

from node.ram.tier import RamTier


class Pinning:
    """Thread-safe: takes the RAM tier's lock."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._order = tier.eviction.order

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Keeps visible pages from eviction for `ttl_ms`; a new pin replaces the old one. Raises Exhausted,
        and pins none, if too much would be pinned."""
        tier = self._tier
        with tier.lock:
            now_ms = tier.clock_ms()
            index = tier.namespaces.find(digest)
            self._order.expire_pins(now_ms)
            pages = [tier.live(index, prefix_hash) for prefix_hash in prefix_hashes]
            self._order.pins.check_room([page for page in pages if page is not None])
            index.account.check_pins(sum(page is not None and page not in self._order.pins for page in pages))
            below = tier.below.pin(digest, prefix_hashes, -(-ttl_ms // 1000))  # may be exhausted too
            for page in pages:
                if page is not None:
                    self._order.pin(page, now_ms + ttl_ms)
            return [page is not None or there for page, there in zip(pages, below, strict=True)]

    def unpin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """True for each that was pinned."""
        tier = self._tier
        with tier.lock:
            index = tier.namespaces.find(digest)
            pages = [index.pages.get(prefix_hash) for prefix_hash in prefix_hashes]
            unpinned = [page is not None and self._order.unpin(page) for page in pages]
            below = tier.below.pin(digest, prefix_hashes, 0)
            return [here or there for here, there in zip(unpinned, below, strict=True)]
