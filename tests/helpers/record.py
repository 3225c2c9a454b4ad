"""Record the stable interfaces: `make golden` records the names; the rest is run by hand.

python tests/helpers/record.py names          golden/names: after names were added or removed
python tests/helpers/record.py conversation   golden/protocol-N.json, wires-N.json: after
                                              PROTOCOL_VERSION was raised
python tests/helpers/record.py data-dir       golden/data-dir-N*.tar.gz: after FORMAT_VERSION
                                              was raised
"""

import contextlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conversation import Caller, requests
from directory import KEY, KEYS, LARGE, LONG_S, PAGES, SETTINGS, SPACE
from surface import LISTS
from told import SMALL, told
from wires import recorded

from kvstore import Client, ClientConfig, Keep
from kvstore.config import PROTOCOL_VERSION
from node.config import NodeConfig
from node.disk.rows import FORMAT_VERSION
from node.server import Node

GOLDEN = Path(__file__).parents[1] / "golden"
# Files that a start recreates, or that contain the path of the recording.
_LEFT_OUT = ("LOG*", "LOCK", "OPTIONS-*", "lock", "keeper.lock")


def names() -> None:
    found = {name: listed() for name, listed in LISTS.items()}
    with tempfile.TemporaryDirectory() as work:
        found["json"] = told(Path(work))
    for name, listed in found.items():
        _write(GOLDEN / "names" / f"{name}.json", listed)


def conversation() -> None:
    with _node() as node:
        caller = Caller(node.service.bulk_port)
        exchanges = {}
        for name, request, data in requests():
            _, reply, _ = caller.ask(request, data)
            exchanges[name] = {"request": request.hex(), "data": data, "reply": reply.hex()}
        caller.close()
    _write(GOLDEN / f"protocol-{PROTOCOL_VERSION}.json", exchanges)
    _write(GOLDEN / f"wires-{PROTOCOL_VERSION}.json", recorded())


def data_dir() -> None:
    for name, key in (("", b""), ("-encrypted", KEY)):
        with tempfile.TemporaryDirectory() as work:
            place, file = Path(work) / "data", Path(work) / "key"
            file.write_text(key.hex())
            file.chmod(0o400)
            locked = {"encrypt_key_file": str(file)} if key else {}
            with contextlib.ExitStack() as ends:
                node = ends.enter_context(_node(**SETTINGS, data_dir=str(place), **locked))
                client = ends.enter_context(
                    Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}", wire="bulk"))
                )
                for space, keys, pages in zip(
                    (SPACE, LARGE)[: 1 if key else 2], KEYS, PAGES, strict=False
                ):
                    client.put(space, keys, pages, Keep(ttl_s=LONG_S, durable=True))
            for pattern in _LEFT_OUT:
                for path in place.rglob(pattern):
                    path.unlink()
            target = GOLDEN / f"data-dir-{FORMAT_VERSION}{name}.tar.gz"
            with tarfile.open(target, "w:gz") as archive:
                archive.add(place, "data")
            print(target, target.stat().st_size, "bytes")


@contextlib.contextmanager
def _node(**settings: Any) -> Iterator[Node]:
    node = Node(NodeConfig(**{**SMALL, **settings}))
    node.start()
    try:
        yield node
    finally:
        node.stop()


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    {"names": names, "conversation": conversation, "data-dir": data_dir}[sys.argv[1]]()
