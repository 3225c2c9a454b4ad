"""How much of a prefix several pools can restore together: pure, from what is present of each.

A pool that is needed for every token (KV, an indexer) covers the lengths up to its first missing page.
A pool that holds the state at a prefix's end (a sliding window, Mamba) covers the lengths whose last
pages are there, with holes between them:

    present, last 2 needed   1 1 0 1 1 1     lengths 1 2 5 6
"""

from collections.abc import Sequence


def covered(present: Sequence[bool], trailing: int = 0) -> list[int]:
    """Lengths in pages, ascending, that one pool covers. `trailing`: how many pages at a length's end it
    needs (fewer where the prefix is shorter); 0: all of them."""
    lengths, run = [], 0
    for page, there in enumerate(present):
        run = run + 1 if there else 0
        if not there and not trailing:
            break
        if run >= min(trailing or page + 1, page + 1):
            lengths.append(page + 1)
    return lengths


def together(pools: Sequence[Sequence[int]]) -> list[int]:
    """Lengths, ascending, that all of these cover; none if there is no pool."""
    return sorted(set(pools[0]).intersection(*pools[1:])) if pools else []
