"""Anyone who can write a cluster's keys in etcd can forge its view.

Forged members do not exist, have swapped addresses or impossible weights, or are nonsense. Calls
must still return right bytes or misses, and end in time. Once the forged keys are gone, the cluster
must be as before. Set `SEEDS=50` for a longer run.
"""

import json
import os
import random
import shutil
import time
from typing import Any

import pytest
from fleets import members
from local_nodes import StartNode
from real_etcd import RealEtcd
from waiting import wait_until

from kvstore import Client, ClientConfig, KVStoreError, Namespace, opaque_layout
from kvstore.tools.trace import page_content
from node.server import Node

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)"
)
SEEDS = int(os.environ.get("SEEDS", "1"))
NODES = ("n1", "n2", "n3")
STEPS = 20
TIMEOUT_S = 3.0
KEYS = [bytes([number]) * 32 for number in range(40)]
SPACE = Namespace("forged", opaque_layout(4096))
PREFIX = "/kvstore/fleet"
NONSENSE: list[Any] = ["", "[]", "{", "null", '"x"', "1" * 400, "[" * 400, '{"address": []}']


def member(randomly: random.Random, addresses: list[str]) -> str:
    """Return a random member record as JSON, plausible or not."""
    fields: dict[str, Any] = {
        "address": randomly.choice(
            [*addresses, "127.0.0.1:9", "::1", "nowhere.invalid:1", "", "127.0.0.1:99999"]
        ),
        "weight": randomly.choice([1.0, 0.0, -1.0, 1e300, 1e-300, "nan", "inf", "x", None, True]),
        "zone": randomly.choice(["", "a", "a/b", "z" * 1000, 7]),
        "state": randomly.choice(["SERVING", "JOINING", "DRAINING", "GONE", 3]),
        "protocol": randomly.choice([5, 4, 3, 0, -1, 1e9, "4", "x"]),
        "token": "00" * 8,
        "instance": "11" * 8,
    }
    if randomly.random() < 0.5:
        fields |= {
            "weight": 1.0,
            "zone": "",
            "state": "SERVING",
            "address": randomly.choice(addresses),
        }
    if randomly.random() < 0.1:
        del fields[randomly.choice(list(fields))]
    return json.dumps(fields)


class Forger:
    def __init__(self, etcd: RealEtcd, nodes: list[Node], randomly: random.Random) -> None:
        self.etcd, self.randomly, self.forged = etcd, randomly, set[str]()
        self.addresses = [f"127.0.0.1:{node.grpc.port}" for node in nodes]
        self.config = self._value(f"{PREFIX}/config")

    def _value(self, key: str) -> str:
        return self.etcd.ctl("get", "--print-value-only", key).strip()

    def forge(self) -> None:
        key, value = self.randomly.choice(
            [self._member, self._member, self._config, self._removed]
        )()
        self.forged.add(key)
        self.etcd.ctl("put", "--", key, value)

    def _member(self) -> tuple[str, str]:
        name = self.randomly.choice([*NODES, "n4", "n5", "a/b", "ü", "x" * 300])
        value = member(self.randomly, self.addresses)
        return f"{PREFIX}/members/{name}", self.randomly.choice(
            [value, value, value, *NONSENSE[:4]]
        )

    def _config(self) -> tuple[str, str]:
        settings = {
            "replicas": self.randomly.choice([1, 2, 3, 0, -1, 99, "x"]),
            "base": self.randomly.choice([0, 1000, 1 << 61, -1]),
        }
        return f"{PREFIX}/config", self.randomly.choice([json.dumps(settings), *NONSENSE])

    def _removed(self) -> tuple[str, str]:
        digest = self.randomly.choice(["00" * 16, "zz", "", "00"])
        return f"{PREFIX}/removed/{digest}", self.randomly.choice(['{"removal": "00"}', *NONSENSE])

    def undo(self) -> None:
        for key in self.forged:
            if key.endswith("/config"):
                self.etcd.ctl("put", "--", key, self.config)
            else:
                self.etcd.ctl("del", "--", key)


def ask(client: Client, randomly: random.Random) -> int:
    """Put and get some pages, and return the number of hits.

    Each call must end in time, and each hit must have the right bytes.
    """
    some, hits = randomly.sample(KEYS, 10), 0
    contents = [page_content(SPACE.digest, key, 4096) for key in some]
    buffers = [bytearray(4096) for _ in some]
    for call in (
        lambda: client.put(SPACE, some, contents),
        lambda: client.get(SPACE, some, buffers),
    ):
        began = time.monotonic()
        try:
            found = call()
        except KVStoreError:
            continue
        finally:
            assert time.monotonic() - began < TIMEOUT_S + 20.0, "a call took too long"
        if found and isinstance(found[0], bool):
            hits += sum(found)
            for content, hit, buffer in zip(contents, found, buffers, strict=True):
                assert not hit or buffer == content
    return hits


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_forged_views_give_right_bytes_or_misses(
    fleet: StartNode, etcd: RealEtcd, seed: int
) -> None:
    randomly = random.Random(seed)
    nodes = [fleet(name, replicas=2) for name in NODES]
    wait_until(lambda: all(members(node) == list(NODES) for node in nodes))
    forger = Forger(etcd, nodes, randomly)
    clients = [
        Client(ClientConfig(address=address, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S))
        for address in forger.addresses
    ]
    try:
        hits = ask(clients[0], randomly)
        for _ in range(STEPS):
            forger.forge()
            hits += ask(randomly.choice(clients), randomly)
            if randomly.random() < 0.2:
                forger.undo()
        assert hits, "no page was found, so the storm tested nothing"
        forger.undo()
        wait_until(lambda: all(members(node) == list(NODES) for node in nodes), 30.0)
        wait_until(lambda: all(node.peers.status().registry == "etcd" for node in nodes), 30.0)
        for client in clients:
            wait_until(lambda client=client: ask(client, randomly) == 10, 30.0)  # type: ignore[misc]
    finally:
        for client in clients:
            client.close()
