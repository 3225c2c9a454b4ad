"""What a node does in a second, from two states of its counters."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console, Group

from kvstore.pb import kvstore_pb2 as pb

# Shown rates and the counter that each is the change of.
RATES = {
    "asked_per_s": "pages_asked",
    "prefix_hits_per_s": "prefix_hits",
    "put_per_s": "pages_put",
    "got_per_s": "pages_got",
    "evicted_per_s": "pages_evicted",
    "put_nbytes_per_s": "nbytes_put",
    "got_nbytes_per_s": "nbytes_got",
}


class Sample(NamedTuple):
    """Of `kvstore top`: what --json prints, and what is shown on a console."""

    values: dict[str, Any]
    view: Callable[[Console], Group]


def rates(before: pb.Counters, now: pb.Counters, seconds: float) -> dict[str, float]:
    # A namespace that was forgotten and opened again counts from zero: no negative rates.
    return {
        name: round(max(0, getattr(now, counter) - getattr(before, counter)) / seconds, 1)
        for name, counter in RATES.items()
    }
