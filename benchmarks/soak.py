"""Check whether a node's private memory grows with former pages, clients and namespaces.

Each round fills a new namespace with pages of 4 KiB and empties it again: by removing it or, with
`--evict`, by the pages of later rounds. The node's private resident memory (RssAnon, from
NodeStatus; without the arena) is printed after each round. The first few rounds may grow it; from
then on the aim is at most 128 KiB a round.

    python benchmarks/soak.py [--rounds 64] [--pages 16384] [--evict] [--disk] [--json]
"""

import contextlib
import secrets
import sys
import tempfile

from measure import Report, parser, progress

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

PAGE_NBYTES = 4096
BATCH = 256
AIM_NBYTES = 128 << 10


def fill(client: Client, namespace: Namespace, pages: int) -> None:
    """Store pages."""
    page = bytes(PAGE_NBYTES)
    for start in range(0, pages, BATCH):
        count = min(BATCH, pages - start)
        client.put(namespace, [secrets.token_bytes(32) for _ in range(count)], [page] * count)


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=64, help="namespaces, one after the other (%(default)s)"
    )
    options.add_argument("--pages", type=int, default=16_384, help="pages of each (%(default)s)")
    options.add_argument(
        "--evict", action="store_true", help="never remove: let the next round evict"
    )
    options.add_argument("--disk", action="store_true", help="with a disk tier")
    args = options.parse_args(argv)
    report = Report(
        "Private memory of the node, namespaces coming and going",
        f"python benchmarks/soak.py {argv}",
    )
    ram_nbytes = -(-args.pages * PAGE_NBYTES // (16 << 20)) * (16 << 20)
    flags = [
        "--ram-bytes",
        str(ram_nbytes),
        "--extent-bytes",
        str(16 << 20),
        "--log-level",
        "WARNING",
    ]
    with contextlib.ExitStack() as stack:
        if args.disk:
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir="."))
            flags += ["--data-dir", directory, "--disk-bytes", str(2 * ram_nbytes)]
        node = stack.enter_context(NodeProcess(*flags))
        client = stack.enter_context(Client(client_config(address=node.address, timeout_s=60.0)))
        tick = stack.enter_context(progress(args.rounds))
        private: list[int] = []
        for number in range(args.rounds):
            namespace = Namespace(model="soak", layout=opaque_layout(PAGE_NBYTES), salt=str(number))
            fill(client, namespace, args.pages)
            if not args.evict:
                client.remove_namespace(namespace)
            private.append(client.node_status().rss_nbytes)
            tick()
    report.rows += [{"round": n, "private, KiB": nbytes >> 10} for n, nbytes in enumerate(private)]
    # Later rounds reuse what the first ones allocated, so the value goes up and down
    quarter = max(1, len(private) // 4)
    growth = (max(private[-quarter:]) - max(private[-2 * quarter : -quarter])) // quarter
    verdict = "met" if growth <= AIM_NBYTES else "missed"
    report.notes.append(
        f"highest of the last quarter above that of the one before, a round: {growth} bytes"
    )
    report.notes.append(f"aim at most {AIM_NBYTES}: {verdict}")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
