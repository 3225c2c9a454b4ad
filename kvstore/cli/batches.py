"""Many keys, piece by piece: for progress, and so that no request outlasts its deadline."""

from collections.abc import Iterable, Iterator
from itertools import islice

from kvstore.client import Client
from kvstore.cluster.spread import Away
from kvstore.keys import Namespace

COUNT_MAX = 4096  # keys in a piece


def pieces(keys: Iterable[bytes], count_max: int = COUNT_MAX) -> Iterator[list[bytes]]:
    """Lists of at most `count_max` keys, in order."""
    rest = iter(keys)
    while piece := list(islice(rest, count_max)):
        yield piece


def all_keys(client: Client, namespace: Namespace) -> Iterator[bytes]:
    """Keys of all pages of a namespace. Pages may be removed as they come: the listing goes on
    behind the last key it gave."""
    return (page.prefix_hash for page in client.list_pages(namespace))


def remove_all(client: Client, namespace: Namespace) -> Away:
    """Removes every page of a namespace; which members of a cluster could not be asked to."""
    away: Away = {}
    for piece in pieces(all_keys(client, namespace)):
        client.remove(namespace, piece, away=away)
    return away
