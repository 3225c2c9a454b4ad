"""A tenant's quota of bytes per second also limits what the node reads and hashes for it."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleets import checked_nodes

import kvstore.checksum
import node.disk.reads
from kvstore import Exhausted, Namespace, opaque_layout
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal, Role
from node.auth.access import Caller
from node.auth.quotas import Quota
from node.server import Node
from node.serving.limits import Charge

MB = 1 << 20
PAGE_NBYTES = 3 * MB
PAGES = 4
RATE = MB
STEP_S = 0.1
SPACE = Namespace("m", opaque_layout(PAGE_NBYTES), "loud")
SMALL = Namespace(
    "m", opaque_layout(64 << 10), "loud"
)  # pages of one leaf, always hashed as a whole
WHO = Caller("tenant loud", principal=lambda: Principal("loud", "loud", Role.WRITE))


class Counted:
    """Counters of the page bytes that this process hashes and reads from disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hashed = self.read = 0
        leaf, update, piece = (
            kvstore.checksum.leaf,
            kvstore.checksum.Leaves.update,
            node.disk.reads.Read._piece,
        )

        def count_leaf(part: Any) -> bytes:
            self.hashed += len(part)
            return leaf(part)

        def count_update(leaves: Any, data: memoryview) -> None:
            self.hashed += len(data)
            update(leaves, data)

        def count_piece(read: Any, files: Any, place: Any, start: int, view: memoryview) -> bool:
            self.read += view.nbytes
            return piece(read, files, place, start, view)

        patch.setattr(kvstore.checksum, "leaf", count_leaf)
        patch.setattr(node.disk.reads, "leaf", count_leaf)
        patch.setattr(kvstore.checksum.Leaves, "update", count_update)
        patch.setattr(node.disk.reads.Read, "_piece", count_piece)


class Bench:
    """A node with one tenant; the clock of its rates is set by the test."""

    def __init__(self, node: Node, counted: Counted) -> None:
        self.node, self.counted, self.now_s = node, counted, 1000.0
        self.service = node.service
        self.rates = node.sessions.tenants.rates
        self.rates._clock_s = lambda: self.now_s
        self.moved = 0

    def limit(self, nbytes_per_s: int = RATE) -> None:
        self.node.quotas.set({"loud": Quota(nbytes_per_s=nbytes_per_s)})
        self.counted.hashed = self.counted.read = self.moved = 0

    def keys(self, space: Namespace, *numbers: int) -> list[bytes]:
        return [bytes([number]) * 32 for number in numbers or range(PAGES)]

    def put(self, space: Namespace, *numbers: int) -> None:
        keys, nbytes = self.keys(space, *numbers), space.stored_nbytes
        with self.node.sessions.open(WHO) as session:
            request = pb.PutRequest(namespace=space.digest, prefix_hashes=keys, page_nbytes=nbytes)
            _, views = self.service.begin_put(session, request)
            self.moved += nbytes * len(views)
            if views:
                leaves = [kvstore.checksum.leaves(view) for view in views]
                self.service.commit_put(session, pb.CommitRequest(leaves=leaves))

    def get(self, space: Namespace, ranges: list[tuple[int, int]], *numbers: int) -> int:
        request = pb.GetRequest(namespace=space.digest, prefix_hashes=self.keys(space, *numbers))
        request.ranges.extend(
            [pb.ByteRange(offset=offset, nbytes=nbytes) for offset, nbytes in ranges]
        )
        with self.node.sessions.open(WHO) as session:
            nbytes, reply, _ = self.service.begin_get(session, request)
        self.moved += nbytes
        return sum(reply.hits)

    def verify(self, space: Namespace, *numbers: int) -> None:
        request = pb.VerifyRequest(namespace=space.digest, prefix_hashes=self.keys(space, *numbers))
        self.service.call("verify", request, WHO)

    def to_disk_only(self) -> None:
        """Write all pages to disk and drop them from RAM."""
        assert self.node.disk is not None
        self.service.durability.flush(self.service.durability.begin_wait())
        for index in self.node.tier.namespaces.all():
            with self.node.tier.lock:
                for page in list(index.pages.values()):
                    self.node.tier.forget(page, "evicted")

    def charged(self, work: Callable[[], object]) -> int:
        """Return the bytes that `work` charges to the tenant while its clock stands still."""
        self.limit(1 << 40)
        self.rates.take("loud")
        before = self.rates._buckets["loud", "bytes"].left
        self.counted.hashed = self.counted.read = self.moved = 0
        work()
        return int(before - self.rates._buckets["loud", "bytes"].left)


@pytest.fixture(scope="module")
def node_with_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with checked_nodes() as start:
        folder = tmp_path_factory.mktemp("charged")
        settings = {
            "ram_nbytes": 32 * MB,
            "extent_nbytes": 4 * MB,
            "disk_nbytes": 64 * MB,
            "scrub_nbytes_per_s": 0,
            "batch_nbytes_max": 16 * MB,
        }
        yield start(data_dir=str(folder), **settings)


@pytest.fixture
def bench(node_with_disk: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Yield a bench on a node without authentication, which trusts its callers' names."""
    monkeypatch.setattr(node_with_disk.access, "open", False)
    monkeypatch.setattr(node_with_disk.access, "sees", lambda *_: True)
    bench = Bench(node_with_disk, Counted(monkeypatch))
    for space in (SPACE, SMALL):
        message = pb.OpenNamespaceRequest(namespace=namespace_message(space), digest=space.digest)
        bench.service.call("open_namespace", message, WHO)
        bench.put(space)
    yield bench
    node_with_disk.quotas.set({})


def scattered(space: Namespace) -> list[tuple[int, int]]:
    """Return ranges of one byte in each leaf."""
    return [(offset, 1) for offset in range(0, space.stored_nbytes, MB)]


REQUESTS: dict[str, Callable[[Bench], object]] = {
    "verify": lambda bench: bench.verify(SPACE),
    "verify of small pages": lambda bench: bench.verify(SMALL),
    "one byte": lambda bench: bench.get(SPACE, [(5, 1)]),
    "one byte of each leaf": lambda bench: bench.get(SPACE, scattered(SPACE)),
    "one byte of small pages": lambda bench: bench.get(SMALL, [(5, 1)]),
    "whole pages": lambda bench: bench.get(SPACE, []),
    "whole pages as a range": lambda bench: bench.get(SPACE, [(0, PAGE_NBYTES)]),
}


@pytest.mark.parametrize("where", ["RAM", "disk", "both"])
@pytest.mark.parametrize("name", REQUESTS)
def test_bytes_rate_charges_read_and_hashed_bytes(bench: Bench, name: str, where: str) -> None:
    ask, counted = REQUESTS[name], bench.counted
    bench.to_disk_only()
    if where == "both":
        assert bench.get(SPACE, []) == bench.get(SMALL, []) == PAGES
    elif where == "RAM":
        bench.node.service._unary["remove"](
            pb.RemoveRequest(namespace=SPACE.digest, prefix_hashes=bench.keys(SPACE)), WHO
        )
        bench.put(SPACE)
        bench.put(SMALL)
    charged = bench.charged(lambda: ask(bench))
    most = max(counted.hashed, counted.read, bench.moved)
    assert charged >= max(counted.hashed, bench.moved) > 0
    assert charged + 4096 * 2 * PAGES >= counted.read, (
        "more was read than charged, except for whole sectors"
    )
    assert charged <= most * 2, "charged more than was done; bytes may be both read and hashed"


@pytest.mark.parametrize("name", REQUESTS)
def test_rate_limits_the_bytes_read_and_hashed(bench: Bench, name: str) -> None:
    """Requests without a pause for 30 s of the clock exceed the rate by at most a batch and 1 s."""
    bench.limit()
    refused, seconds = 0, 30
    for _ in range(int(seconds / STEP_S)):
        bench.now_s += STEP_S
        try:
            REQUESTS[name](bench)
        except Exhausted:
            refused += 1
    batch = 2 * PAGES * PAGE_NBYTES  # a verify reads pages in RAM and on disk
    for nbytes in (bench.counted.hashed, bench.counted.read, bench.moved):
        assert nbytes <= RATE * (seconds + 1) + batch
    assert refused


def test_get_is_charged_its_bytes_and_a_miss_nothing(bench: Bench) -> None:
    bench.get(SPACE, [])
    assert bench.charged(lambda: bench.get(SPACE, [])) == PAGES * PAGE_NBYTES == bench.moved
    assert bench.charged(lambda: bench.get(SPACE, [], 99)) == 0
    assert bench.charged(lambda: bench.put(SPACE)) == 0, "a put of present pages was charged"
    bench.to_disk_only()
    assert bench.charged(lambda: bench.get(SPACE, [])) == PAGES * PAGE_NBYTES, (
        "bytes read and moved were not charged once"
    )


def test_request_that_finds_damage_or_fails_is_charged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(SPACE, 7)
    with bench.node.service._verifying._inventory.inspected(
        SPACE.digest, bench.keys(SPACE, 7)[0]
    ) as page:
        assert page is not None
        bench.node.arena.view(page.offset, 1)[0] ^= 1
    assert bench.charged(lambda: bench.get(SPACE, [(0, 1)], 7)) >= MB
    bench.to_disk_only()

    def fail(*_: Any) -> bool:
        raise Exhausted("the reader can not begin")

    with monkeypatch.context() as patch:
        patch.setattr(bench.node.disk.reading, "verify", fail)

        def ask() -> None:
            with contextlib.suppress(Exhausted):
                bench.verify(SPACE)

        assert bench.charged(ask) == PAGE_NBYTES
    assert bench.charged(lambda: bench.verify(SPACE)) == PAGES * PAGE_NBYTES


def test_charge_is_the_larger_of_bytes_moved_and_processed() -> None:
    randomly, taken = random.Random(1), [0]

    def take(nbytes: int) -> None:
        assert nbytes > 0
        taken[0] += nbytes

    charge, moved, worked = Charge(take), 0, 0
    for _ in range(100):
        nbytes = randomly.randrange(100)
        if randomly.random() < 0.5:
            charge.add_transferred(nbytes)
            moved += nbytes
        else:
            charge.add_processed(nbytes)
            worked += nbytes
        assert taken[0] == max(moved, worked)
