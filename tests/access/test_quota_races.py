"""Quotas under many concurrent connections of a tenant: each limit holds at every moment, and all
counters return to zero, even while tokens are rotated. Set `SEEDS=100` for a longer run.
"""

import contextlib
import hashlib
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from local_nodes import StartNode
from people import People, client, taken_up

from kvstore import Exhausted, KVStoreError, Namespace, Unauthenticated, opaque_layout
from kvstore.tools.trace import page_content
from node.server import Node

SEEDS = int(os.environ.get("SEEDS", "1"))
MB, PAGE_NBYTES = 1 << 20, 16 << 10
SPACE = Namespace("m", opaque_layout(PAGE_NBYTES), "loud")
QUIET = Namespace("m", opaque_layout(PAGE_NBYTES), "quiet")
RAM, PINS, HELD = 2 * MB, 12, 512 << 10
RUN_S = 1.0
NUMBERS = range(400)


def keys(numbers: Any) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def contents(space: Namespace, some: list[bytes]) -> list[bytes]:
    return [page_content(space.digest, key, PAGE_NBYTES) for key in some]


class Storm:
    """Random calls from many threads of one tenant, each with clients of its own."""

    def __init__(self, node: Node, people: People, seed: int) -> None:
        self.node, self.people, self.seed = node, people, seed
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.done = self.refused = 0

    def ask(self, number: int) -> None:
        randomly = random.Random(f"{self.seed} {number}")
        while not self.stop.is_set():
            try:
                self._ask(randomly, ["bulk", "grpc", "shm"][number % 3])
            except (Exhausted, Unauthenticated):
                self.refused += 1
            except KVStoreError:
                pass  # the node closed the connection to make room for another
            except BaseException as error:
                self.wrong.append(repr(error))
                raise

    def _ask(self, randomly: random.Random, wire: str) -> None:
        with client(self.node, self.people.tokens["loud"], wire=wire, near="none") as one:
            for _ in range(20):
                if self.stop.is_set():
                    return
                some = keys(randomly.sample(NUMBERS, 8))
                with contextlib.suppress(Exhausted):
                    step = randomly.randrange(5)
                    if step == 0:
                        one.pin(SPACE, some, 0.2)
                    elif step == 1 and wire == "shm":
                        with one.open_get(SPACE, some):
                            time.sleep(0.001)
                    elif step < 4:
                        one.put(SPACE, some, contents(SPACE, some))
                    else:
                        self._get(one, some)
                    self.done += 1

    def _get(self, one: Any, some: list[bytes]) -> None:
        buffers = [bytearray(PAGE_NBYTES) for _ in some]
        hits = one.get(SPACE, some, buffers)
        for content, hit, buffer in zip(contents(SPACE, some), hits, buffers, strict=True):
            if hit and buffer != content:
                self.wrong.append("wrong bytes")

    def rotate(self) -> None:
        """Replace the token while calls run."""
        old = self.people.tokens["loud"]
        self.people.tokens["loud"] = self.people.join("loud-2", "loud", "write")
        self.people.leave("loud")
        taken_up(self.node, lambda: _refused(self.node, old))

    def watch(self) -> None:
        """Check the limits while the other threads make calls."""
        account, tenants = (
            self.node.tier.eviction.order.accounts.of("loud"),
            self.node.sessions.tenants,
        )
        while not self.stop.is_set():
            with self.node.tier.lock:
                found = account.nbytes, account.pins
            held = tenants._held["loud"]
            if found[0] > RAM or found[1] > PINS or held > HELD:
                self.wrong.append(f"{found=} {held=}")
            time.sleep(0.0005)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_quotas_over_many_connections_hold_at_every_moment(
    start_node: StartNode, tmp_path: Path, seed: int
) -> None:
    people = People(tmp_path / "identities")
    for tenant in ("loud", "quiet"):
        people.join(tenant, tenant, "write")
        people.say(f"tenant {tenant} ram={RAM} pins={PINS} held={HELD} connections=9")
    node = start_node(identities=str(people.path), shm_trust="loud,quiet")
    with client(node, people.tokens["quiet"], wire="bulk", near="none") as quiet:
        kept = keys(range(100))
        quiet.put(QUIET, kept, contents(QUIET, kept))
        storm = Storm(node, people, seed)
        threads = [threading.Thread(target=storm.ask, args=(number,)) for number in range(12)]
        threads.append(threading.Thread(target=storm.watch))
        for thread in threads:
            thread.start()
        try:
            time.sleep(RUN_S / 2)
            storm.rotate()
            time.sleep(RUN_S / 2)
        finally:
            storm.stop.set()
            for thread in threads:
                thread.join()
        assert storm.wrong == []
        assert storm.done, "no call succeeded"
        buffers = [bytearray(PAGE_NBYTES) for _ in kept]
        assert quiet.get(QUIET, kept, buffers) == [True] * len(kept)
        assert buffers == contents(QUIET, kept)
    tenants = node.sessions.tenants
    assert (tenants._held["loud"], node.sessions.reserved.used, node.sessions.held.used) == (
        0,
        0,
        0,
    )
    assert node.check() == []


def _refused(node: Node, token: str) -> bool:
    try:
        node.access.of_token(token)
    except Unauthenticated:
        return True
    return False
