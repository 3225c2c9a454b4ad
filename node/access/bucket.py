"""So much at once, and so much a second after that: a bucket that fills steadily."""


class Bucket:
    """Not thread-safe. `left` may be taken into debt, which is made up for first."""

    __slots__ = ("at_s", "left")

    def __init__(self, most: float, now_s: float) -> None:
        self.left = most
        self.at_s = now_s

    def fill(self, rate: float, most: float, now_s: float) -> float:
        """What is there now."""
        self.left = min(most, self.left + rate * (now_s - self.at_s))
        self.at_s = now_s
        return self.left

    def take(self, rate: float, most: float, now_s: float) -> bool:
        """One, if there is one."""
        if self.fill(rate, most, now_s) < 1.0:
            return False
        self.left -= 1.0
        return True
