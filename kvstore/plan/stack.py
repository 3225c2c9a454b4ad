"""Exact LRU of all sizes at once: how many other pages were used since each page of a request was.

A node ages a request's pages tail first (docs/decisions/0005), and a page stands for itself and all before it. So after
every request, for each page p and the page q before it in its chain,

    q is newer than p       whoever uses p uses q in the same request, and q after p

and it follows, with `distance` the number of pages that are newer when the request comes,

    a store of C pages has exactly those with distance < C           (LRU keeps what is newest)
    distances rise along a chain                                     (q is newer than p)
    so of each request it has a leading run, and no page behind it   (the prefix condition holds by itself)

What a request used and nobody since is the end of its chain: who uses a page uses all before it. The whole order is
therefore one *run* for each request, newest request first, each head to tail, and a request takes the beginnings of a
few runs. Each costs a logarithm of the number of requests, whatever its pages; memory is 8 bytes a page.
"""

from typing import NamedTuple

ID_NBYTES = 8  # chains are ids as u64 in the machine's order, so that runs are compared as bytes


class Reuse(NamedTuple):
    """`pages` consecutive ones of a chain, of which request number `last` was the last to use any: the first has
    `distance`, each further one a distance greater by one."""

    distance: int
    pages: int
    last: int


class Stack:
    """Pages are named by all ids up to theirs, so ids that are no prefix hashes do no harm."""

    def __init__(self) -> None:
        self._runs: dict[int, int] = {}  # hash of the chain up to a run's first page -> its request
        self._ids: list[bytes] = []  # of each request's run
        self._sums = [0]  # pages in runs: Fenwick (1994), grown by appending
        self.pages = 0  # distinct ones

    @property
    def requests(self) -> int:
        return len(self._ids)

    def use(self, chain: bytes) -> list[Reuse]:
        """Pages of a request that were used before, in the order of the chain; then it is the newest."""
        found: list[Reuse] = []
        at, end = 0, len(chain)
        while at < end:
            last = self._runs.pop(hash(chain[: at + ID_NBYTES]), None)
            if last is None:
                break
            ids = self._ids[last]
            length = _common_nbytes(chain, at, ids)
            if not length:
                break  # two chains of one hash, of 2^64
            taken = at // ID_NBYTES  # pages of this request, all newer, that are counted no more
            found.append(Reuse(self._newer(last) + taken, length // ID_NBYTES, last))
            self._add(last, -(length // ID_NBYTES))
            at += length
            rest = self._ids[last] = ids[length:]
            if rest:
                self._runs[hash(chain[:at] + rest[:ID_NBYTES])] = last
        if chain:
            self._runs[hash(chain[:ID_NBYTES])] = len(self._ids)
        self._ids.append(chain)
        self._append(end // ID_NBYTES)
        return found

    # ---- sums: node i (from 1) has those of requests i - (i & -i) .. i - 1 ---------------------------------

    def _newer(self, number: int) -> int:
        """Pages in the runs of later requests."""
        sums, place, older = self._sums, number + 1, 0
        while place:
            older += sums[place]
            place &= place - 1
        return self.pages - older

    def _add(self, number: int, count: int) -> None:
        """Its pages leave `pages` too, until the request that took them is appended."""
        sums, place, end = self._sums, number + 1, len(self._sums)
        while place < end:
            sums[place] += count
            place += place & -place
        self.pages += count

    def _append(self, count: int) -> None:
        sums, place = self._sums, len(self._sums)
        total, below, stop = count, place - 1, place & (place - 1)
        while below > stop:
            total += sums[below]
            below &= below - 1
        sums.append(total)
        self.pages += count


def _common_nbytes(chain: bytes, at: int, ids: bytes) -> int:
    """How much of the chain from `at` on is the same as `ids`, in whole ids."""
    most = min(len(chain) - at, len(ids))
    if chain[at : at + most] == ids[:most]:
        return most
    least = 0  # what is the same; the first difference is before `most`
    while most - least > ID_NBYTES:
        middle = (least + most) // (2 * ID_NBYTES) * ID_NBYTES
        if chain[at + least : at + middle] == ids[least:middle]:
            least = middle
        else:
            most = middle
    return least
