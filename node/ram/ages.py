"""Which slot size has the oldest page. Pure."""

from collections.abc import Callable

from node.ram.agenda import Agenda

LOOKED_AT = 64  # sizes, in search of the one with the oldest page; what is found out stays known


class Ages:
    """Slot sizes by the last use of their oldest page, as far as known: a use of that page makes it later,
    and shows when the size is looked at next. So a use costs nothing here.

    `oldest(size)` says when the oldest page that may go was used, None if there is none; `paused` that it
    could not look on. Not thread-safe.
    """

    def __init__(self, oldest: Callable[[int], int | None], paused: Callable[[], bool]) -> None:
        self._oldest = oldest
        self._paused = paused
        self._ages: Agenda[int] = Agenda()

    def __contains__(self, size: int) -> bool:
        return size in self._ages

    def add(self, size: int, used: int) -> None:
        """It has a page that may go, used then; perhaps its oldest."""
        known = self._ages.key(size)
        if known is None or used < known:
            self._ages.put(size, used)

    def discard(self, size: int) -> None:
        self._ages.discard(size)

    def older(self, than: int | None, but: int, count: int) -> list[int]:
        """Other sizes whose oldest page is older (than None: any), that with the oldest first. A size whose
        pages may not go is forgotten; whoever returns one of them adds it."""
        found: list[tuple[int, int]] = []
        for _ in range(LOOKED_AT):
            first = self._ages.first(LOOKED_AT)
            if first is None or (than is not None and first[0] >= than) or len(found) > count:
                break
            used, size = first
            actual = self._oldest(size)
            if actual is None and self._paused():
                break
            self._ages.discard(size)
            if actual == used:
                found.append(first)
            elif actual is not None:
                self._ages.put(size, actual)
        for used, size in found:
            self._ages.put(size, used)
        return [size for _, size in found if size != but][:count]
