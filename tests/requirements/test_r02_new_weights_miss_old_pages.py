"""R2: after a weight update the epoch is raised, and the old weights' pages miss, in RAM and on
disk.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from known_pages import Pages
from local_nodes import Connect

from kvstore import PutOutcome
from node.config import NodeConfig
from node.server import Node

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(8)]


@contextlib.contextmanager
def running(data_dir: Path) -> Iterator[Node]:
    ports: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
    node = Node(
        NodeConfig(
            data_dir=str(data_dir), ram_nbytes=4 << 20, disk_nbytes=128 << 20, drain_s=0.5, **ports
        )
    )
    node.start()
    try:
        yield node
    finally:
        node.stop()


def test_r02_raised_epoch_misses_old_pages_and_hits_its_own(
    tmp_path: Path, connect: Connect
) -> None:
    """After the epoch was raised, the same prefix hashes miss the old pages in RAM and on disk.

    The restart empties RAM, so that pages are read from disk. Each wire has a model of its own.
    """
    for is_restarted in (False, True):
        with running(tmp_path) as node:
            for wire in ("shm", "bulk", "grpc"):
                client, model = connect(node, wire), f"model {wire}"
                old, new = Pages(model), Pages(model, epoch=1)
                if not is_restarted:
                    assert old.put(client, KEYS[:6]) == [PutOutcome.STORED] * 6
                    assert client.lookup(new.namespace, KEYS).prefix_pages == 0
                    assert new.get(client, KEYS) == [False] * 8
                    assert new.put(client, KEYS[:4]) == [PutOutcome.STORED] * 4
                    client.flush()
                assert new.get(client, KEYS) == [True] * 4 + [False] * 4
                assert old.get(client, KEYS) == [True] * 6 + [False] * 2
                assert [page.prefix_hash for page in client.list_pages(new.namespace)] == sorted(
                    KEYS[:4]
                )
                assert client.lookup(Pages(model, epoch=2).namespace, KEYS).prefix_pages == 0


def test_r02_space_of_the_old_epoch_can_be_freed_at_once(tmp_path: Path, connect: Connect) -> None:
    old, new = Pages("model"), Pages("model", epoch=1)
    with running(tmp_path) as node:
        client = connect(node)
        old.put(client, KEYS)
        new.put(client, KEYS[:2])
        client.flush()
        assert client.remove_namespace(old.namespace) == 8
        status = client.node_status()
        assert (status.disk.page_count, status.ram.page_count) == (2, 2)
        assert new.get(client, KEYS[:2]) == [True, True]
