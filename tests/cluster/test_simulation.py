"""Random lives of a cluster in virtual time (`simulated.py`).

Members crash, pause, are cut off, join, drain and leave; messages are lost, late and doubled;
clients have old views. These must hold:

* No page has another key's bytes, and no call takes longer than its deadline.
* A page whose removal has ended, and which is not put again, is nowhere.
* A page acknowledged with ack=all is kept while at most R - 1 members are lost at a time.
* When all is quiet, each page is at all its owners, no queue holds work, and all counters are
  right.
"""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from simulated import CALL_S, KEPT, PAGE_NBYTES, SPACE, SimClient, SimCluster, content
from virtual import LATE_S, Network, World

from kvstore.cluster.view import State
from kvstore.errors import KVStoreError

Result = TypeVar("Result")
KEYS = [bytes([number]) * 32 for number in range(120)]
BUSY_S, QUIET_S = 30.0, 180.0
CLIENTS = 3
DOUBTFUL_S = 15.0  # a late removal may wait for a paused member


class Life:
    """One cluster, its clients, and what they know for certain."""

    def __init__(self, seed: int, members: int, replicas: int, **network: float) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.network = Network(self.world, **network)
        self.cluster = SimCluster(self.rng, self.world, self.network, members, replicas)
        self.clients = [SimClient(self.cluster, f"c{number}") for number in range(CLIENTS)]
        self.acked: set[bytes] = set()  # acknowledged by all owners, not removed since
        self.removed: dict[bytes, float] = {}  # when the call ended; parts may come late
        self.forgotten: set[bytes] = set()  # removed everywhere, not put since
        self.done: dict[str, int] = {}
        self.slowest_s = 0.0
        self.quiet = self.breaking = False
        self.breaks = 0

    def run(self, faults: bool, busy_s: float = BUSY_S) -> None:
        for client in self.clients:
            self.world.spawn(client.name, partial(self._use, client))
        if faults:
            self.world.spawn("faults", self._break)
        self.world.run(busy_s)
        self.quiet = True
        self.network.lost = self.network.late = 0.0
        self.world.run(self.world.now + LATE_S[1] + CALL_S)
        for node in self.cluster.nodes.values():
            node.swept_view = 0  # the sweep that also runs without a change
        end = self.world.now + QUIET_S
        while self.world.now < end and not self.cluster.settled:
            self.world.run(self.world.now + 1.0)
        self.world.run(self.world.now + 2.0)  # and it stays settled
        self.world.end()

    # ---- clients -------------------------------------------------------------------------

    def _use(self, client: SimClient) -> None:
        while not self.quiet:
            keys = self.rng.sample(KEYS, self.rng.randint(1, 12))
            name, operation = self.rng.choices(
                [
                    ("put", self._put),
                    ("ack", self._put_ack),
                    ("get", self._get),
                    ("remove", self._remove),
                    ("once", self._once),
                ],
                (4, 3, 6, 1, 2),
            )[0]
            try:
                operation(client, keys)
                self.done[name] = self.done.get(name, 0) + 1
            except KVStoreError as error:
                self.done[type(error).__name__] = self.done.get(type(error).__name__, 0) + 1
            self.world.sleep(self.rng.uniform(0.0, 0.2))

    def _timed(self, call: Callable[..., Result], *arguments: Any) -> Result:
        begun = self.world.now
        try:
            return call(*arguments)
        finally:
            self.slowest_s = max(self.slowest_s, self.world.now - begun)

    def _put(self, client: SimClient, keys: list[bytes]) -> None:
        self._timed(client.put, keys, False)

    def _put_ack(self, client: SimClient, keys: list[bytes]) -> None:
        whole, breaks = not self.breaking, self.breaks
        verdicts = self._timed(client.put, keys, True)
        stored = [key for key, verdict in zip(keys, verdicts, strict=True) if verdict in KEPT[:2]]
        certain = {
            key
            for key in stored
            if self.world.now - self.removed.get(key, -DOUBTFUL_S) > DOUBTFUL_S
        }
        self.acked |= certain
        if whole and breaks == self.breaks:  # no fault during the call
            for key in certain:
                copies = sum(key in node.keys for node in self.cluster.nodes.values())
                assert copies >= self.cluster.view.replicas, (
                    f"{copies} copies of {key.hex()[:4]}, acknowledged by all"
                )

    def _get(self, client: SimClient, keys: list[bytes]) -> None:
        for key, page in zip(keys, self._timed(client.get, keys), strict=True):
            assert page is None or page == content(key), f"wrong bytes under {key.hex()}"

    def _remove(self, client: SimClient, keys: list[bytes]) -> None:
        self.removed.update(dict.fromkeys(keys, self.world.now))
        try:
            self._timed(client.remove, keys)
        finally:
            self.removed.update(dict.fromkeys(keys, self.world.now))
            self.acked.difference_update(keys)

    def _once(self, client: SimClient, _: list[bytes]) -> None:
        """Put pages that no other client uses, and remove them while they are replicated."""
        keys = [self.rng.randbytes(32) for _ in range(4)]
        try:
            self._timed(client.put, keys, False)
        finally:
            self.world.sleep(self.rng.choice([0.0, 0.05, 0.5]))
            self._timed(client.remove, keys)
            self.forgotten.update(keys)

    # ---- faults --------------------------------------------------------------------------

    def _break(self) -> None:
        """Cause one fault after the other: at most one member loses its pages at a time."""
        while not self.quiet:
            self.world.sleep(self.rng.uniform(1.0, 4.0))
            self.breaking = True
            self.breaks += 1
            self.rng.choice([self._crash, self._pause, self._cut, self._come_and_go, self._drain])()
            self._wait(lambda: self.cluster.settled, float("inf"))
            self.breaking = False

    def _any(self) -> str:
        return self.rng.choice(sorted(self.cluster.nodes))

    def _crash(self) -> None:
        """Kill a member; it comes back empty, before or after its lease expires."""
        name = self._any()
        self._count("crash")
        self.cluster.kill(name)
        self.world.sleep(self.rng.choice([0.5, 5.0]))
        if self.rng.random() < 0.5:
            self.cluster.announce(name, None)
            self._wait(lambda: self.cluster.settled, 30.0)
            self.cluster.announce(name, State.JOINING)
        self.cluster.start(name)

    def _pause(self) -> None:
        self._count("pause")
        self.network.paused_until[self._any()] = self.world.now + self.rng.uniform(0.5, 6.0)

    def _cut(self) -> None:
        """Cut some members and clients off from the others."""
        self._count("cut")
        hosts = [*self.cluster.nodes, *(client.name for client in self.clients)]
        side = set(self.rng.sample(hosts, len(hosts) // 2))
        self.network.apart = {frozenset((a, b)) for a in side for b in hosts if b not in side}
        self.world.sleep(self.rng.uniform(0.5, 6.0))
        self.network.apart = set()

    def _come_and_go(self) -> None:
        self._count("join")
        name = f"m{len(self.cluster.view.members) + self.done['join'] + 10}"
        self.cluster.announce(name, State.JOINING)
        self.cluster.start(name)

    def _drain(self) -> None:
        if len(self.cluster.nodes) > 3:
            self._count("drain")
            name = self._any()
            self.cluster.announce(name, State.DRAINING)
            self._wait(self._drained, 60.0)
            self.cluster.announce(name, None)
            self.world.sleep(2.0)
            self.cluster.kill(name)

    def _drained(self) -> bool:
        view = self.cluster.view
        return all(
            node.view == view and node.swept_view == view.number
            for node in self.cluster.nodes.values()
        )

    def _wait(self, wanted: Callable[[], bool], seconds: float) -> None:
        end = self.world.now + seconds
        while not wanted() and self.world.now < end:
            self.world.sleep(0.5)

    def _count(self, name: str) -> None:
        self.done[name] = self.done.get(name, 0) + 1

    # ---- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        cluster = self.cluster
        assert self.slowest_s <= CALL_S + 0.1, f"a call took {self.slowest_s:.2f} s"
        assert cluster.settled, "the members disagree, or still sweep"
        everything = set().union(*(node.keys for node in cluster.nodes.values()))
        owners = cluster.view.owners.owners(SPACE.digest, sorted(everything))
        for key, some in zip(sorted(everything), owners, strict=True):
            lacking = [name for name in some if key not in cluster.nodes[name].keys]
            assert not lacking, f"{lacking} lack {key.hex()[:4]} of {some}"
        assert not self.acked - everything, (
            f"{len(self.acked - everything)} acknowledged pages are lost"
        )
        assert not self.forgotten & everything, (
            f"{len(self.forgotten & everything)} removed pages are back"
        )
        for node in cluster.nodes.values():
            assert node.tier.check() == []
            assert node.queue.check() == []
            assert not node.queue.nbytes
            for key, page in node.tier.namespace(SPACE.digest).pages.items():
                assert node.memory(page.offset, PAGE_NBYTES) == content(key)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Life]:
    def live(seed: int, faults: bool = True, busy_s: float = BUSY_S, **settings: float) -> Life:
        life = Life(seed, **settings)  # type: ignore[arg-type]
        monkeypatch.setattr(
            "kvstore.deadline.time", SimpleNamespace(monotonic=life.world.monotonic)
        )
        life.run(faults, busy_s)
        return life

    return live


@pytest.mark.parametrize(
    ("number", "busy_s"),
    [
        (0, BUSY_S / 2),
        *(pytest.param(number, 2 * BUSY_S, marks=pytest.mark.long) for number in range(1, 4)),
    ],
)
def test_random_faults_lose_no_acknowledged_page(
    live: Callable[..., Life], seed: int, number: int, busy_s: float
) -> None:
    life = live(
        seed + number, busy_s=busy_s, members=4, replicas=2, lost=0.01, late=0.02, doubled=0.02
    )
    life.check()
    if busy_s > BUSY_S:  # in a shorter life it may happen that faults leave no time for these
        assert life.done["ack"] > 5, life.done
        assert life.forgotten


def test_simulation_without_faults_has_no_errors(live: Callable[..., Life], seed: int) -> None:
    life = live(seed, faults=False, busy_s=BUSY_S / 5, members=5, replicas=3)
    life.check()
    assert set(life.done) <= {"put", "ack", "get", "remove", "once"}, life.done


def test_random_faults_without_replicas_leave_a_consistent_cluster(
    live: Callable[..., Life], seed: int
) -> None:
    life = live(seed, busy_s=BUSY_S / 2, members=3, replicas=1, lost=0.01, late=0.02)
    life.acked.clear()  # a lost member takes its pages with it
    life.check()
