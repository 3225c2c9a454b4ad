"""Which members own a key: weighted rendezvous hashing over slots. Pure, and the same in every process and version.

    key --xxh3--> one of 2^19 slots --> members by score, the best first --> R of them, each from a zone of its own

A member's score in a slot depends on nothing but its id, its weight and the slot. So who joins takes slots from all
others in proportion to the weights, who leaves gives its own to all others, and nothing else moves. A slot's owners are
worked out when it is first asked for: a view costs nothing until then. (Thaler and Ravishankar 1998; weights as in
Schindelhauer and Schomaker 2005.)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.checksum import hash64, key_seed

# Of 64 equal members the fullest has 3 to 4 % more than the mean, with 2^16 it would have 8 %.
SLOT_COUNT = 1 << 19
UNIT = 1 / (1 << 64)  # makes 64 drawn bits a number in 0..1


class Candidate(NamedTuple):
    """Who may own keys. `zone`: empty where it fails alone."""

    id: str
    weight: float
    zone: str = ""


class Placement:
    """Thread-safe: what two threads work out at once is the same."""

    def __init__(self, candidates: Sequence[Candidate], replicas: int) -> None:
        ordered = sorted(candidates)
        self._ids = [some.id for some in ordered]
        self._zones = [some.zone for some in ordered]
        self._drawn = [(hash64(some.id.encode()), 1 / some.weight) for some in ordered]
        self._replicas = min(replicas, len(ordered))
        self._slots: list[tuple[str, ...] | None] = [None] * SLOT_COUNT
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all slots with the same owners

    def owners(self, namespace: bytes, prefix_hashes: Sequence[bytes]) -> list[tuple[str, ...]]:
        """Of each key: ids of as many members as there are replicas, fewer if there are fewer, the first one first.
        `namespace`: its digest."""
        known, found = self._slots, []
        for prefix_hash in prefix_hashes:
            slot = key_seed(namespace, prefix_hash) % SLOT_COUNT
            found.append(known[slot] or self._place(slot))
        return found

    def _place(self, slot: int) -> tuple[str, ...]:
        """The least score wins: of exponential variables the least is a member's with a probability in proportion to
        its weight."""
        name, log = slot.to_bytes(4, "little"), math.log
        scores = [-log((hash64(name, seed) + 1) * UNIT) * mean for seed, mean in self._drawn]
        owners = self._spread(sorted(range(len(scores)), key=scores.__getitem__))
        self._slots[slot] = owners = self._alike.setdefault(owners, owners)
        return owners

    def _spread(self, ranked: list[int]) -> tuple[str, ...]:
        """The best, each from a zone that has none of them yet; then from any, if there are not so many zones."""
        chosen: list[int] = []
        zones: set[str] = set()
        for member in ranked:
            if len(chosen) == self._replicas:
                break
            zone = self._zones[member]
            if not zone or zone not in zones:
                chosen.append(member)
                zones.add(zone)
        rest = [member for member in ranked if member not in chosen] if len(chosen) < self._replicas else []
        return tuple(self._ids[member] for member in (chosen + rest)[: self._replicas])
