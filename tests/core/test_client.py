"""The client against a real node over all wires: buffers, split batches, threads, damaged pages."""

import ctypes
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from log_windows import one_window
from waiting import PATIENT

import kvstore.client
from kvstore import (
    Client,
    ClientConfig,
    Exhausted,
    InvalidRequest,
    LayerGroup,
    LayoutMismatch,
    Namespace,
    PageLayout,
    Plane,
    PutOutcome,
    opaque_layout,
    prefix_hashes,
)
from kvstore.log_rate import LINES
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content

PAGE = 4096


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return Namespace(request.node.name, opaque_layout(PAGE))


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def content(namespace: Namespace, key: bytes) -> bytes:
    return page_content(namespace.digest, key, namespace.layout.page_nbytes)


def put(client: Client, namespace: Namespace, keys: list[bytes]) -> list[PutOutcome]:
    return client.put(namespace, keys, [content(namespace, key) for key in keys])


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(PAGE),
    "slice of a memoryview": lambda: memoryview(bytearray(3 * PAGE))[PAGE : 2 * PAGE],
    "mmap": lambda: mmap.mmap(-1, PAGE),
    "ctypes": ctypes.c_uint32 * (PAGE // 4),
    "bfloat16 tensor": lambda: torch.zeros(PAGE // 2, dtype=torch.bfloat16),
    "slice of a tensor": lambda: torch.zeros(4, PAGE, dtype=torch.uint8)[2],
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_pages_move_between_the_callers_buffers(
    client: Client, namespace: Namespace, kind: str
) -> None:
    (key,) = keys_of(1)
    data = content(namespace, key)
    source, target = BUFFERS[kind](), BUFFERS[kind]()
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if isinstance(source, torch.Tensor):
        source.view(torch.uint8).copy_(flat)
    else:
        memoryview(source).cast("B")[:] = data
    assert client.put(namespace, [key], [source]) == [PutOutcome.STORED]
    assert client.get(namespace, [key], [target]) == [True]
    if isinstance(target, torch.Tensor):
        assert torch.equal(target.view(torch.uint8), flat)
    else:
        assert memoryview(target).cast("B") == data


@pytest.mark.parametrize(
    ("buffer", "named"),
    [
        (memoryview(bytearray(2 * PAGE))[::2], "not contiguous"),
        (torch.zeros(PAGE, 2, dtype=torch.uint8)[:, 0], "not contiguous"),
        (bytearray(PAGE - 1), "4095 bytes, expected 4096"),
        (bytes(PAGE), "read-only"),
        ("text", "neither a buffer"),
    ],
)
def test_unsuitable_buffer_is_refused_before_any_request(
    client: Client, namespace: Namespace, buffer: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        client.get(namespace, keys_of(1), [buffer])
    assert client.stats.connects == 0


def test_buffers_and_keys_must_be_as_many(client: Client, namespace: Namespace) -> None:
    with pytest.raises(InvalidRequest, match="2 prefix hashes for 1 buffers"):
        client.put(namespace, keys_of(1, 2), [bytes(PAGE)])
    with pytest.raises(InvalidRequest, match="1 prefix hashes for 2 buffers"):
        client.get(namespace, keys_of(1), [bytearray(PAGE)] * 2)


@pytest.mark.parametrize("keys", [[], [b""], [b"x" * 15], [b"x" * 65]])
def test_bad_keys_are_refused_by_every_call(
    client: Client, namespace: Namespace, keys: list[bytes]
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.lookup(namespace, keys),
        lambda: client.put(namespace, keys, [bytes(PAGE)] * len(keys)),
        lambda: client.get(namespace, keys, [bytearray(PAGE)] * len(keys)),
        lambda: client.remove(namespace, keys),
        lambda: client.pin(namespace, keys, 1.0),
        lambda: client.unpin(namespace, keys),
        lambda: client.stat(namespace, keys),
        lambda: client.verify(namespace, keys),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()
    assert client.stats.connects == 0


def test_repeated_key_is_refused_in_put_and_allowed_in_get(
    client: Client, namespace: Namespace
) -> None:
    key = keys_of(1)
    with pytest.raises(InvalidRequest, match="twice"):
        client.put(namespace, key * 2, [bytes(PAGE)] * 2)
    put(client, namespace, key)
    buffers = [bytearray(PAGE), bytearray(PAGE)]
    assert client.get(namespace, key * 2, buffers) == [True, True]
    assert buffers[0] == buffers[1] == content(namespace, key[0])


def test_prefix_get_stops_at_the_first_miss(client: Client, namespace: Namespace) -> None:
    put(client, namespace, keys_of(0, 1, 3))
    buffers = [bytearray(PAGE) for _ in range(4)]
    assert client.get(namespace, keys_of(0, 1, 2, 3), buffers, prefix=True) == [
        True,
        True,
        False,
        False,
    ]
    assert not any(buffers[3])
    assert client.get(namespace, keys_of(0, 1, 2, 3), buffers) == [True, True, False, True]


def test_layer_is_read_by_its_ranges(client: Client) -> None:
    k, v = Plane("k", "bfloat16", (4, 16)), Plane("v", "bfloat16", (4, 8))
    index = LayerGroup("index", (1,), (Plane("row", "uint8", (132,)),))
    layout = PageLayout(8, (LayerGroup("full", (0, 1, 2), (k, v)), index))
    namespace = Namespace("layers", layout, salt=client.config.wire)
    keys = prefix_hashes(range(32), 8)
    put(client, namespace, keys)
    for layer in layout.layers:
        ranges = layout.layer_ranges(layer)
        buffers = [bytearray(sum(part.nbytes for part in ranges)) for _ in range(5)]
        absent = b"absent" * 4
        assert client.get_ranges(namespace, [*keys, absent], ranges, buffers) == [True] * 4 + [
            False
        ]
        for key, buffer in zip(keys, buffers, strict=False):
            page = content(namespace, key)
            assert buffer == b"".join(
                page[part.offset : part.offset + part.nbytes] for part in ranges
            )


@pytest.fixture(scope="module")
def narrow_node() -> Iterator[NodeProcess]:
    """Start a node with small limits, so that calls must be split."""
    flags = (
        "--ram-bytes",
        "256KiB",
        "--extent-bytes",
        "64KiB",
        "--batch-bytes-max",
        "64KiB",
        "--batch-keys-max",
        "8",
    )
    with NodeProcess(*flags) as node:
        yield node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def narrow(request: pytest.FixtureRequest, narrow_node: NodeProcess) -> Iterator[Client]:
    with Client(ClientConfig(address=narrow_node.address, wire=request.param, **PATIENT)) as client:
        yield client


def test_batches_larger_than_the_limits_are_split(narrow: Client, namespace: Namespace) -> None:
    keys = keys_of(*range(40))
    assert put(narrow, namespace, keys) == [PutOutcome.STORED] * 40
    buffers = [bytearray(PAGE) for _ in keys]
    assert narrow.get(namespace, keys, buffers) == [True] * 40
    assert buffers == [content(namespace, key) for key in keys]
    assert narrow.lookup(namespace, [*keys, b"absent" * 4]).prefix_pages == 40
    assert (
        narrow.pin(namespace, keys[:32], 60.0) == [True] * 32
    )  # half of the node's RAM may be pinned
    assert narrow.unpin(namespace, keys) == [True] * 32 + [False] * 8
    assert narrow.verify(namespace, keys) == (40, 0, 0)
    assert [page.present for page in narrow.stat(namespace, keys)] == [True] * 40
    assert [page.prefix_hash for page in narrow.list_pages(namespace)] == keys
    assert narrow.remove(namespace, keys) == [True] * 40


@pytest.mark.parametrize(
    ("narrow", "ask"),
    # All operations share one loop
    [
        ("bulk", "lookup"),
        pytest.param("shm", "lookup", marks=pytest.mark.long),
        pytest.param("grpc", "lookup", marks=pytest.mark.long),
        pytest.param("bulk", "pin", marks=pytest.mark.long),
    ],
    indirect=["narrow"],
)
def test_too_many_keys_for_the_timeout_are_no_node_failure(
    narrow: Client, namespace: Namespace, ask: str
) -> None:
    """A prompt of a million tokens must not open the circuit breaker for other calls."""
    narrow.open(namespace)
    many = [number.to_bytes(16, "big") for number in range(500_000)]
    with pytest.raises(Exhausted, match="keys were answered in 1 s"):
        narrow.lookup(namespace, many, timeout_s=1.0) if ask == "lookup" else narrow.pin(
            namespace, many, 1.0, 1.0
        )
    assert narrow.lookup(namespace, many[:3]).present == (False,) * 3


def test_ranges_over_the_piece_limit_are_split(client: Client, namespace: Namespace) -> None:
    keys = keys_of(*range(40))
    put(client, namespace, keys)
    ranges = [type(namespace.layout.layer_ranges(0)[0])(i, 1) for i in range(0, PAGE, 2)]
    buffers = [bytearray(PAGE // 2) for _ in keys]
    assert client.get_ranges(namespace, keys, ranges, buffers) == [True] * 40
    assert buffers == [content(namespace, key)[::2] for key in keys]


@pytest.mark.parametrize("use", ["put", "get", "lookup"])
def test_chain_in_several_batches_is_evicted_tail_first(
    narrow: Client, namespace: Namespace, use: str
) -> None:
    """Of 64 slots a chain takes 40, in batches of 8; then 30 other pages evict its last six."""
    chain = keys_of(*range(40))
    put(narrow, namespace, chain)
    if use == "get":
        assert all(narrow.get(namespace, chain, [bytearray(PAGE) for _ in chain]))
    elif use == "lookup":
        assert all(narrow.lookup(namespace, chain, touch=True).present)
    put(narrow, namespace, keys_of(*range(100, 130)))
    assert narrow.lookup(namespace, chain).present == (True,) * 34 + (False,) * 6
    narrow.remove(namespace, [*chain, *keys_of(*range(100, 130))])


def test_threads_share_one_client(client: Client, namespace: Namespace) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(10):
                keys = keys_of(*rng.sample(range(60), 8))
                put(client, namespace, keys)
                buffers = [bytearray(PAGE) for _ in keys]
                for key, hit, buffer in zip(
                    keys, client.get(namespace, keys, buffers), buffers, strict=True
                ):
                    assert not hit or buffer == content(namespace, key)
        except BaseException as error:  # noqa: BLE001 -- raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert client.stats.connects == 1
    assert client.stats.failures == 0


def test_two_writers_of_one_page_store_it_once(client: Client, namespace: Namespace) -> None:
    barrier, outcomes = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        outcomes.extend(put(client, namespace, keys_of(1)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(PutOutcome.STORED) == 1
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BUSY}


def test_page_with_a_wrong_checksum_is_a_miss_and_dropped(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if client.config.wire == "bulk":
            patch.setattr("kvstore.transports.bulk._leaves", lambda page: b"c" * 8)
        elif client.config.wire == "shm":
            patch.setattr("kvstore.transports.shm._write_page", lambda slot, page: b"c" * 8)
        else:
            patch.setattr(
                "kvstore.transports.grpc_wire.joined_leaves", lambda page, nbytes: b"c" * 8
            )
        assert put(client, namespace, keys_of(1)) == [PutOutcome.STORED]
    assert client.lookup(namespace, keys_of(1)).prefix_pages == 1
    buffers = [bytearray(PAGE), bytearray(PAGE)]
    # The key is asked twice, and reported once
    assert client.get(namespace, keys_of(1) * 2, buffers) == [
        False,
        False,
    ]
    assert client.stats.corrupt_pages == 2
    assert client.lookup(namespace, keys_of(1)).prefix_pages == 0
    assert put(client, namespace, keys_of(1)) == [PutOutcome.STORED]
    assert client.get(namespace, keys_of(1), buffers[:1]) == [True]


def test_wire_that_damages_pages_does_not_flood_the_log(
    shared_node: NodeProcess,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The node's copy is intact and stays, so each get is a miss."""
    one_window(kvstore.client.log, monkeypatch)
    with Client(ClientConfig(address=shared_node.address, wire="bulk", **PATIENT)) as client:
        put(client, namespace, keys_of(1))
        monkeypatch.setattr("kvstore.transports.bulk.root", lambda leaves, seed: b"c" * 16)
        for _ in range(4 * LINES):
            assert client.get(namespace, keys_of(1), [bytearray(PAGE)]) == [False]
    assert 0 < len(caplog.records) <= LINES


def test_pages_of_another_layout_are_refused(client: Client, namespace: Namespace) -> None:
    put(client, namespace, keys_of(1))
    mislabelled = Namespace(namespace.model, opaque_layout(2 * PAGE))
    object.__setattr__(mislabelled, "digest", namespace.digest)  # as a client with a bug would
    with pytest.raises(LayoutMismatch):
        client.put(mislabelled, keys_of(2), [bytes(2 * PAGE)])


def test_listing_goes_in_order_and_in_pieces(client: Client, namespace: Namespace) -> None:
    keys = keys_of(*range(2500))
    put(client, namespace, keys)
    assert [page.prefix_hash for page in client.list_pages(namespace)] == keys
    assert [page.prefix_hash for page in client.list_pages(namespace, limit=1500)] == keys[:1500]
    assert [
        page.prefix_hash for page in client.list_pages(namespace, after=keys[99], limit=5)
    ] == keys[100:105]
    prefix = keys[0x0500][:-1]
    assert [page.prefix_hash for page in client.list_pages(namespace, prefix)] == keys[
        0x0500:0x0600
    ]
    assert list(client.list_pages(namespace, b"\xff")) == []
    client.remove(namespace, keys)


def test_pinned_pages_can_be_removed(client: Client, namespace: Namespace) -> None:
    put(client, namespace, keys_of(1, 2))
    assert client.pin(namespace, keys_of(1), 60.0) == [True]
    assert client.remove(namespace, keys_of(1, 2, 3)) == [True, True, False]
    assert client.lookup(namespace, keys_of(1, 2)).present == (False, False)
    assert client.unpin(namespace, keys_of(1)) == [False]
