"""Reference results for the planner: an LRU store page by page, and the optimum by exhaustion."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.tools.trace import TraceRequest

Chain = tuple[int, ...]


def lru_hits(chains: Iterable[Chain], pages: int) -> int:
    """Return the leading pages found in an LRU of `pages` pages, each request used tail to head.

    A page is identified by its whole chain.
    """
    used: OrderedDict[Chain, None] = OrderedDict()  # oldest first
    hits = 0
    for chain in chains:
        names = [chain[: end + 1] for end in range(len(chain))]
        hits += sum(1 for _ in itertools.takewhile(used.__contains__, names))
        for name in reversed(names):
            used[name] = None
            used.move_to_end(name)
        while len(used) > pages:
            used.popitem(last=False)
    return hits


def most_hits(chains: Sequence[Chain], pages: int) -> int:
    """Return the most leading pages that any policy can hit.

    The policy keeps at most `pages` pages between requests; all possible choices are tried.
    """
    best: dict[frozenset[Chain], int] = {frozenset(): 0}  # what is kept -> hits so far
    for chain in chains:
        names = [chain[: end + 1] for end in range(len(chain))]
        following: dict[frozenset[Chain], int] = {}
        for kept, hits in best.items():
            now = hits + sum(1 for _ in itertools.takewhile(kept.__contains__, names))
            there = kept | set(names)
            for count in range(min(pages, len(there)) + 1):
                for chosen in map(frozenset, itertools.combinations(there, count)):
                    following[chosen] = max(following.get(chosen, 0), now)
        best = following
    return max(best.values())


def trees(seed: int, requests: int, fresh: float, deep: int) -> list[TraceRequest]:
    """Return requests along the branches of random trees: chains grow, branch and are reused."""
    chance, ids = random.Random(seed), itertools.count()
    chains: list[Chain] = []
    made = []
    for number in range(requests):
        chain: Chain = ()
        if chains and chance.random() > fresh:
            chain = chains[-1 - min(int(chance.expovariate(0.2)), len(chains) - 1)]
            chain = chain[: chance.randint(1, len(chain))]
        chain += tuple(next(ids) for _ in range(chance.randint(0 if chain else 1, deep)))
        chains.append(chain)
        made.append(TraceRequest(number * 250.0, len(chain) * 16 - chance.randint(0, 15), 1, chain))
    return made
