"""Measure a page's cost beside its bytes: private memory per page, outside the arena.

Pages of 4 KiB are stored through the client. The node's private resident memory (RssAnon, from
NodeStatus; the arena is shared memory and not in it) is read before and after; the growth is
divided by the number of pages. Before the first reading a few thousand pages are put and removed,
so that buffers and threads that exist once do not count.
Aim: at most 600 bytes a page at 200,000 pages.

    python benchmarks/metadata.py [--pages 200000] [--json]
"""

import contextlib
import secrets
import sys
from collections.abc import Callable

from measure import Report, parser, progress

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.results import PutOutcome
from kvstore.tools.node_process import NodeProcess

PAGE_NBYTES = 4096
EXTENT_NBYTES = 16 << 20
BATCH = 256
WARMUP_PAGES = 32 * BATCH
AIM_NBYTES = 600


class Store:
    """Puts pages in batches; one buffer serves as content of them all."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._namespace = Namespace(model="benchmark", layout=opaque_layout(PAGE_NBYTES))
        self._page = bytes(PAGE_NBYTES)

    def put(self, count: int) -> list[bytes]:
        """Store a batch under new random keys and return these."""
        hashes = [secrets.token_bytes(32) for _ in range(count)]
        assert set(self._client.put(self._namespace, hashes, [self._page] * count)) == {
            PutOutcome.STORED
        }
        return hashes

    def warm_up(self) -> None:
        """Store and remove pages."""
        for hashes in [self.put(BATCH) for _ in range(WARMUP_PAGES // BATCH)]:
            self._client.remove(self._namespace, hashes)

    def fill(self, pages: int, tick: Callable[[], None]) -> None:
        """Store pages."""
        for start in range(0, pages, BATCH):
            self.put(min(BATCH, pages - start))
            tick()


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--pages", type=int, default=200_000, help="pages to store (%(default)s)")
    args = options.parse_args(argv)
    report = Report(
        f"Private memory of the node per page of {PAGE_NBYTES} bytes",
        " ".join(["python benchmarks/metadata.py", *argv]),
    )
    ram_nbytes = -(-(max(args.pages, WARMUP_PAGES) * PAGE_NBYTES) // EXTENT_NBYTES) * EXTENT_NBYTES
    flags = (
        "--ram-bytes",
        str(ram_nbytes),
        "--extent-bytes",
        str(EXTENT_NBYTES),
        "--log-level",
        "WARNING",
    )
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*flags))
        client = stack.enter_context(Client(client_config(address=node.address, timeout_s=60.0)))
        tick = stack.enter_context(progress(-(-args.pages // BATCH)))
        store = Store(client)
        store.warm_up()
        before = client.node_status().rss_nbytes
        store.fill(args.pages, tick)
        status = client.node_status()
    assert status.ram.page_count == args.pages, (
        f"{status.ram.page_count} pages are stored, not {args.pages}"
    )
    each = round((status.rss_nbytes - before) / args.pages)
    report.rows.append(
        {
            "pages": args.pages,
            "private before, MiB": round(before / (1 << 20), 1),
            "private after, MiB": round(status.rss_nbytes / (1 << 20), 1),
            "bytes per page": each,
            f"aim {AIM_NBYTES}": "met" if each <= AIM_NBYTES else "missed",
        }
    )
    report.notes.append(
        f"before: after {WARMUP_PAGES} pages were put and removed, so one-time buffers do not count"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
