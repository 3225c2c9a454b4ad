"""Pages that wait until RAM has turned over before they go to a disk that is full."""

from collections import deque

from node.ram.page import Page, State

SIFTED = 4  # looked at for each that comes


class Later:
    """In the order in which they came, each with when it is due. Those that RAM has evicted meanwhile are sifted
    out, a few with each that comes, so that no call takes longer the more there are. Not thread-safe.

        sifted: oldest ... | pages: not looked at in this round ... newest
    """

    def __init__(self) -> None:
        self._sifted: deque[tuple[int, Page]] = deque()
        self._pages: deque[tuple[int, Page]] = deque()

    def __len__(self) -> int:
        return len(self._sifted) + len(self._pages)

    def add(self, due: int, page: Page, count_max: int) -> None:
        """`due`: no less than that of the one before. From `count_max` pages on it looks for evicted ones."""
        self._pages.append((due, page))
        if len(self) > count_max:
            for _ in range(SIFTED):
                self._sift()

    def _sift(self) -> None:
        if not self._pages:
            self._sifted, self._pages = self._pages, self._sifted
        if self._pages:
            entry = self._pages.popleft()
            if entry[1].state is State.VISIBLE:
                self._sifted.append(entry)

    def first(self) -> tuple[int, Page]:
        """(due, page). Raises IndexError if there is none."""
        return (self._sifted or self._pages)[0]

    def pop(self) -> Page:
        return (self._sifted or self._pages).popleft()[1]
