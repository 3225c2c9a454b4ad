"""Byte ranges of a get, as they may come."""

import itertools

from kvstore.errors import InvalidRequest


def check_ranges(ranges: list[tuple[int, int]], page_nbytes: int) -> None:
    """Raises InvalidRequest. In any order, but each byte once: what a get returns is bounded by its pages."""
    end = 0
    ordered = True
    for offset, nbytes in ranges:
        if not nbytes or offset + nbytes > page_nbytes:
            raise InvalidRequest(f"range {offset}+{nbytes} is empty or leaves the page of {page_nbytes} bytes")
        ordered = ordered and offset >= end
        end = offset + nbytes
    if not ordered:
        in_order = sorted(ranges)
        for (offset, nbytes), (following, _) in itertools.pairwise(in_order):
            if offset + nbytes > following:
                raise InvalidRequest(f"range {offset}+{nbytes} overlaps the one at {following}; ask for a byte once")
