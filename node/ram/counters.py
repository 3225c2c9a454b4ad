"""What happened, in numbers."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """What happened to pages of a namespace; names as in the Counters message."""

    pages_asked: int = 0
    prefix_hits: int = 0
    pages_hit: int = 0
    miss_absent: int = 0
    miss_evicted: int = 0
    miss_writing: int = 0
    miss_removed: int = 0
    miss_corrupt: int = 0
    miss_expired: int = 0
    pages_put: int = 0
    pages_put_exists: int = 0
    pages_put_busy: int = 0
    pages_put_full: int = 0
    pages_put_aborted: int = 0
    pages_got: int = 0
    pages_get_missed: int = 0
    pages_evicted: int = 0
    nbytes_put: int = 0
    nbytes_got: int = 0

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: "Counters") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def count_put(self, exists: int, busy: int, full: int) -> None:
        """Pages of a put that are not to be written."""
        self.pages_put_exists += exists
        self.pages_put_busy += busy
        self.pages_put_full += full

    def count_get(self, hits: int, misses: int, wanted_nbytes: int) -> None:
        """Pages of a get; `wanted_nbytes` of each hit."""
        self.pages_got += hits
        self.nbytes_got += hits * wanted_nbytes
        self.pages_get_missed += misses
