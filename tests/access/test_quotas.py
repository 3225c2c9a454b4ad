"""Quotas of two tenants on one node: a flood of puts, pins, leases or calls of one tenant costs the
other no page.
"""

import contextlib
import dataclasses
import hashlib
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fleets import check_and_stop
from local_nodes import StartNode
from people import People, client, soon_touched, taken_up
from waiting import wait_until

from kvstore import (
    Client,
    ClientConfig,
    Exhausted,
    KVStoreError,
    Namespace,
    PutOutcome,
    opaque_layout,
)
from kvstore.deadline import Deadline
from kvstore.layout import ByteRange
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tools.trace import page_content
from kvstore.transports.bulk import BulkWire

MB = 1 << 20
PAGE_NBYTES = 16 << 10
QUIET = Namespace("m", opaque_layout(PAGE_NBYTES), "quiet")
LOUD = Namespace("m", opaque_layout(PAGE_NBYTES), "loud")
PAGES = 300  # pages of the quiet tenant, which has room for 448


def keys(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def contents(space: Namespace, some: Sequence[bytes]) -> list[bytes]:
    return [page_content(space.digest, key, space.layout.page_nbytes) for key in some]


def put(who: Client, space: Namespace, some: Sequence[bytes]) -> list[PutOutcome]:
    return who.put(space, some, contents(space, some))


def get(who: Client, space: Namespace, some: Sequence[bytes]) -> list[bool]:
    """Get pages, compare the bytes of each hit, and return the hits."""
    buffers = [bytearray(space.layout.page_nbytes) for _ in some]
    hits = who.get(space, some, buffers)
    for content, hit, buffer in zip(contents(space, some), hits, buffers, strict=True):
        assert not hit or buffer == content
    return hits


class Town:
    """A node with two tenants and their clients."""

    def __init__(self, start_node: StartNode, folder: Path, **loud: str) -> None:
        self.people = People(folder / "identities")
        for tenant in ("quiet", "loud"):
            self.people.join(tenant, tenant, "write")
        self.people.join("operator", "*", "admin")
        self.people.say("tenant quiet ram=7MiB")
        self.people.say(
            "tenant loud ram=7MiB " + " ".join(f"{name}={text}" for name, text in loud.items())
        )
        self.node = start_node(identities=str(self.people.path), shm_trust="loud,quiet")
        self.clients: list[Client] = []

    def client(self, name: str, wire: str = "bulk", **settings: Any) -> Client:
        self.clients.append(client(self.node, self.people.tokens[name], wire=wire, **settings))
        return self.clients[-1]

    def use(self, tenant: str) -> Any:
        status = self.client("operator").node_status()
        (use,) = (use for use in status.tenants if use.tenant == tenant)
        return use


@pytest.fixture
def town(start_node: StartNode, tmp_path: Path) -> Iterator[Callable[..., Town]]:
    towns: list[Town] = []

    def found(**loud: str) -> Town:
        towns.append(Town(start_node, tmp_path, **loud))
        return towns[-1]

    yield found
    for town in towns:
        for some in town.clients:
            some.close()
        check_and_stop(town.node)  # an idle node uses CPU


def flood(town: Town, loud: Client, space: Namespace, count: int) -> None:
    for start in range(0, count, 32):
        with contextlib.suppress(Exhausted):
            put(loud, space, keys(*range(start, start + 32)))


def pins(town: Town) -> None:
    loud = town.client("loud")
    for start in range(0, 640, 32):
        with contextlib.suppress(Exhausted):
            put(loud, LOUD, keys(*range(start, start + 32)))
            loud.pin(LOUD, keys(*range(start, start + 32)), 3600.0)


def sizes(town: Town) -> None:
    loud = town.client("loud")
    for number in range(1, 60):
        space = dataclasses.replace(LOUD, layout=opaque_layout(number * 3000))
        with contextlib.suppress(Exhausted):
            put(loud, space, keys(*range(8)))


def holds(town: Town) -> None:
    with contextlib.ExitStack() as held:
        for start in range(0, 640, 64):
            # Each client has a few connections
            loud, some = town.client("loud", "shm"), keys(*range(start, start + 64))
            with contextlib.suppress(Exhausted):
                put(loud, LOUD, some)
                held.enter_context(loud.open_get(LOUD, some))
        assert get(town.client("quiet"), QUIET, keys(*range(PAGES))) == [True] * PAGES


def descriptions(town: Town) -> None:
    """Open namespaces with long descriptions until they are refused."""
    loud = town.client("loud")
    for number in range(100):
        space = dataclasses.replace(LOUD, salt="s" * 1000 + str(number), revision="r" * 1000)
        with contextlib.suppress(KVStoreError):
            put(loud, space, keys(1))


def silence(town: Town) -> None:
    """Open connections that send nothing."""
    with contextlib.ExitStack() as open_sockets:
        for _ in range(300):
            with contextlib.suppress(OSError):
                open_sockets.enter_context(
                    socket.create_connection(("127.0.0.1", town.node.bulk.port), 5.0)
                )
        assert get(town.client("quiet"), QUIET, keys(1)) == [True]


def ask_often(who: Client) -> None:
    for _ in range(10_000):
        who.lookup(LOUD, keys(1))


def asking(town: Town) -> None:
    """Send calls from many clients at a time, of which the operator's calls are refused."""

    def ask() -> None:
        loud = town.client("loud")
        for _ in range(30):
            with contextlib.suppress(KVStoreError):
                loud.scrub()
            with contextlib.suppress(KVStoreError):
                loud.lookup(LOUD, keys(*range(500)))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ATTACKS = {
    "flood": lambda town: flood(town, town.client("loud"), LOUD, 2000),
    "flood over gRPC": lambda town: flood(town, town.client("loud", "grpc"), LOUD, 1000),
    "pins": pins,
    "sizes": sizes,
    "holds": holds,
    "descriptions": descriptions,
    "silence": silence,
    "asking": asking,
}


LONG = ("flood over gRPC", "sizes", "descriptions")  # floods, too


@pytest.mark.parametrize(
    "attack",
    [pytest.param(a, marks=[pytest.mark.long] if a in LONG else []) for a in ATTACKS],
)
def test_attack_of_one_tenant_costs_the_other_no_page(
    town: Callable[..., Town], attack: str
) -> None:
    where = town()
    quiet = where.client("quiet")
    kept = keys(*range(PAGES))
    assert set(put(quiet, QUIET, kept)) == {PutOutcome.STORED}
    ATTACKS[attack](where)
    assert get(quiet, QUIET, kept) == [True] * PAGES
    more = keys(*range(1000, 1100))
    assert set(put(quiet, QUIET, more)) == {PutOutcome.STORED}, "a put within the quota failed"
    assert get(quiet, QUIET, kept + more) == [True] * (PAGES + 100)
    assert where.use("loud").ram_nbytes <= 7 * MB


def test_request_over_a_quota_is_refused_and_counted(town: Callable[..., Town]) -> None:
    where = town(pins="10", held="64KiB", requests="40/s")
    loud = where.client("loud", "shm")
    put(loud, LOUD, keys(*range(20)))
    with pytest.raises(
        Exhausted, match="tenant loud has 0 pages pinned and requests 11 more; its quota is 10"
    ):
        loud.pin(LOUD, keys(*range(11)), 60.0)
    assert loud.pin(LOUD, keys(*range(10)), 60.0) == [True] * 10
    with (
        loud.open_get(LOUD, keys(0, 1, 2, 3)),
        pytest.raises(Exhausted, match="tenant loud holds 65536 bytes"),
    ):
        where.client("loud", "shm").open_get(LOUD, keys(4)).__enter__()
    with pytest.raises(
        Exhausted, match="tenant loud has had the 40 requests a second of its quota"
    ):
        ask_often(loud)
    assert put(where.client("quiet"), QUIET, keys(1)) == [PutOutcome.STORED]
    use = where.use("loud")
    assert (use.pin_count, use.refused_pins, use.refused_holds) == (10, 1, 1)
    assert use.refused_requests >= 1
    assert where.use("quiet").refused_requests == 0


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize("quota", ["requests", "bytes"])
def test_puts_and_gets_count_for_the_rates(
    town: Callable[..., Town], wire: str, op: str, quota: str
) -> None:
    """Puts and gets that the client splits into several requests count for both rates.

    A request after the first is refused, unless they are seconds apart.
    """
    where, many = town(**{quota: "1/s"}), keys(*range(2048))
    put(where.client("operator"), LOUD, many[:2])
    loud, pages = where.client("loud", wire=wire), [bytearray(PAGE_NBYTES)] * len(many)

    def ask_often() -> None:
        for _ in range(3):
            loud.put(LOUD, many, pages) if op == "put" else loud.get(LOUD, many, pages)

    with pytest.raises(Exhausted, match=f"1 {quota} a second of its quota"):
        ask_often()


@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize("quota", ["requests", "bytes"])
def test_put_or_get_without_a_lookup_counts_for_the_rates(
    town: Callable[..., Town], op: str, quota: str
) -> None:
    """A put or get without the lookup that our client sends before it counts for both rates."""
    where = town(**{quota: "1/s"})
    put(where.client("operator"), LOUD, keys(0))
    wire = BulkWire(
        "127.0.0.1", where.node.bulk.port, ClientConfig(token=where.people.tokens["loud"])
    )
    page = memoryview(bytearray(PAGE_NBYTES))

    def ask_often() -> None:
        for number in range(1, 200):
            about: Any = {
                "namespace": LOUD.digest,
                "prefix_hashes": keys(number if op == "put" else 0),
            }
            if op == "put":
                wire.put(pb.PutRequest(**about, page_nbytes=PAGE_NBYTES), [(page,)], Deadline(20.0))
            else:
                wire.get(pb.GetRequest(**about), [(page,)], [0], Deadline(20.0))

    with (
        contextlib.closing(wire),
        pytest.raises(Exhausted, match=f"1 {quota} a second of its quota"),
    ):
        ask_often()


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
@pytest.mark.parametrize("op", ["verify", "range"])
def test_hashed_bytes_count_for_the_rate(town: Callable[..., Town], wire: str, op: str) -> None:
    """Regression: at a quota of 1 MiB/s, a tenant got 461 MiB/s verified and 2,870 MiB/s read.

    The latter was for ranges of one byte.
    """
    where, many = town(bytes="64KiB/s"), keys(*range(64))
    put(where.client("operator"), LOUD, many)
    loud, buffers = where.client("loud", wire=wire), [bytearray(1) for _ in many]

    def ask_often() -> None:
        for _ in range(20):  # 20 MiB, in less than five minutes
            loud.verify(LOUD, many) if op == "verify" else loud.get_ranges(
                LOUD, many, [ByteRange(3, 1)], buffers
            )

    with pytest.raises(Exhausted, match="65536 bytes a second of its quota"):
        ask_often()
    assert where.use("loud").refused_bytes == 1


def test_quota_limits_the_connections_of_a_tenant(town: Callable[..., Town]) -> None:
    where = town(connections="3")
    loud = [where.client("loud", connect_timeout_s=5.0, timeout_s=10.0) for _ in range(6)]
    for one in loud:
        put(one, LOUD, keys(1))
    wait_until(lambda: where.node.bulk.count <= 3)  # the longest idle connections were closed
    assert put(where.client("quiet"), QUIET, keys(1)) == [PutOutcome.STORED]


def test_changed_quotas_apply_at_once_and_are_in_the_metrics(town: Callable[..., Town]) -> None:
    where = town()
    loud = where.client("loud")
    flood(where, loud, LOUD, 640)
    assert where.use("loud").ram_nbytes == 7 * MB
    text = where.people.path.read_text().replace("tenant loud ram=7MiB", "tenant loud ram=1MiB")
    where.people.path.write_text(text)
    soon_touched(where.people.path)
    taken_up(where.node, lambda: where.use("loud").ram_quota_nbytes == MB)
    put(loud, LOUD, keys(9999))
    assert where.use("loud").ram_nbytes == MB
    address = f"http://127.0.0.1:{where.node.metrics.port}/metrics"
    request = urllib.request.Request(
        address, headers={"Authorization": f"Bearer {where.people.tokens['quiet']}"}
    )
    with urllib.request.urlopen(request, timeout=20.0) as reply:
        metrics = reply.read().decode()
    assert 'kvstore_tenant_ram_quota_bytes{tenant="quiet"} 7.340032e+06' in metrics
    assert "loud" not in metrics
