"""When pins end. Pure: no clock of its own."""

import heapq

from node.ram.page import Page


class Pins:
    """Pages with the time until which they may not be evicted. Not thread-safe."""

    def __init__(self) -> None:
        self._expiry_ms: dict[Page, int] = {}
        self._heap: list[tuple[int, int, Page]] = []  # (expiry, number, page); may be outdated
        self._number = 0

    def __contains__(self, page: Page) -> bool:
        return page in self._expiry_ms

    def __len__(self) -> int:
        return len(self._expiry_ms)

    def expiry_ms(self, page: Page) -> int | None:
        return self._expiry_ms.get(page)

    def add(self, page: Page, expiry_ms: int) -> None:
        """A new pin replaces the old one."""
        self._expiry_ms[page] = expiry_ms
        self._number += 1
        heapq.heappush(self._heap, (expiry_ms, self._number, page))
        if len(self._heap) > 2 * len(self._expiry_ms) + 64:  # mostly renewed or removed ones
            self._heap = [pin for pin in self._heap if self._expiry_ms.get(pin[2]) == pin[0]]
            heapq.heapify(self._heap)

    def discard(self, page: Page) -> bool:
        """False if it was not pinned."""
        return self._expiry_ms.pop(page, None) is not None

    def ended(self, now_ms: int) -> list[Page]:
        """Pages whose pin is over by now; still pinned until discarded."""
        pages = []
        while self._heap and self._heap[0][0] <= now_ms:
            expiry_ms, _, page = heapq.heappop(self._heap)
            if self._expiry_ms.get(page) == expiry_ms:  # else: unpinned, renewed or gone
                pages.append(page)
        return pages
