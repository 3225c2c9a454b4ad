"""A gateway that ends during a put or a get leaves nothing at the node and no wrong bytes.

The node is in the test's process, its gateway in one of its own.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from gateway_store import PAGE_NBYTES, SPACE, Store, chunk, committed, content
from request_stream import RequestStream
from stopping import stop
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub

MEMORY_MORE_NBYTES = 32 << 20
UNREAD_NBYTES = 1_900_000  # size of a message that waits in the flow-control window of its stream


@pytest.fixture(scope="module")
def store(start_store: Callable[..., Store]) -> Store:
    made = start_store()
    made.watch()
    made.serves()
    made.limit_memory(MEMORY_MORE_NBYTES)
    os.kill(made.pid, signal.SIGKILL)  # the next gateway has that limit
    wait_until(lambda: made.end_count == 1)
    made.serves()
    return made


# ---- ways to end -----------------------------------------------------------------------------


def kill(store: Store) -> None:
    os.kill(store.pid, signal.SIGKILL)


def hang(store: Store) -> None:
    stop(store.pid)


def fill(store: Store) -> None:
    """Fill the gateway's memory with messages of health watches, which it does not read."""
    with store.channel() as channel:
        watch = channel.stream_stream("/grpc.health.v1.Health/Watch")
        talks = [watch(iter([b"", *[bytes(UNREAD_NBYTES)] * 2]), timeout=60.0) for _ in range(30)]
        for talk in talks:
            with pytest.raises(grpc.RpcError):
                list(talk)


HOW = {"killed": kill, "hung": hang, "memory": fill}  # by the node's reason for the end
# The node does the same for each reason, so two phases are enough for the slower ones.
SHORT = ("put_amid_its_bytes", "get_amid_its_bytes")


# ---- phases: each yields a call that has reached it ------------------------------------------


@contextlib.contextmanager
def put_before_verdicts(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with store.channel() as channel, store.held_up("begin_put", patch) as entered:
        call = store.put(channel, key, frames)
        entered()
        yield call


@contextlib.contextmanager
def put_after_verdicts(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with store.channel() as channel:
        call = store.put(channel, key, frames)
        assert next(call).begin.verdicts == [pb.WRITE]
        yield call


@contextlib.contextmanager
def put_amid_its_bytes(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with put_after_verdicts(store, key, frames, patch) as call:
        frames.say(chunk(content(key)[: PAGE_NBYTES // 2]))
        yield call


@contextlib.contextmanager
def put_before_its_commit(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with put_after_verdicts(store, key, frames, patch) as call:
        frames.say(chunk(content(key)))
        yield call


@contextlib.contextmanager
def put_before_it_is_committed(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with (
        put_before_its_commit(store, key, frames, patch) as call,
        store.held_up("commit_put", patch) as entered,
    ):
        frames.say(committed(key))
        entered()
        yield call


@contextlib.contextmanager
def put_before_its_answer(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    held = store.held_up("commit_put", patch, behind=True)
    with put_before_its_commit(store, key, frames, patch) as call, held as entered:
        frames.say(committed(key))
        entered()
        yield call


@contextlib.contextmanager
def get_before_its_reply(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    keys = store.stored(1)
    with store.channel() as channel, store.held_up("begin_get", patch) as entered:
        call = KVStoreStub(channel).Get(
            pb.GetRequest(namespace=SPACE.digest, prefix_hashes=keys), timeout=60.0
        )
        entered()
        yield call


@contextlib.contextmanager
def get_amid_its_bytes(
    store: Store, key: bytes, frames: RequestStream, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Yield a get of more bytes than sockets and gRPC buffer."""
    keys = store.stored(24)
    with store.channel() as channel:
        call = KVStoreStub(channel).Get(
            pb.GetRequest(namespace=SPACE.digest, prefix_hashes=keys), timeout=60.0
        )
        assert list(next(call).begin.hits) == [True] * 24
        next(call)
        yield call


PUTS = [put_before_verdicts, put_after_verdicts, put_amid_its_bytes, put_before_its_commit]
PUTS += [put_before_it_is_committed, put_before_its_answer]
# A commit that reached the node is done, whether or not the client gets its reply
STORED = (put_before_it_is_committed, put_before_its_answer)


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        pytest.param(
            phase,
            how,
            marks=[pytest.mark.long] if how != "killed" and phase.__name__ not in SHORT else [],
        )
        for phase in (*PUTS, get_before_its_reply, get_amid_its_bytes)
        for how in HOW
    ],
)
def test_ended_gateway_leaves_nothing_behind(
    store: Store, frames: RequestStream, monkeypatch: pytest.MonkeyPatch, phase: Any, how: str
) -> None:
    if how == "hung":  # any gateway is silent for so long on a starved machine
        monkeypatch.setattr("node.gateway.supervisor.SILENT_S_MAX", 2.0)
    key, count, why = store.key(), store.end_count, store.node.grpc.ends[how]
    with phase(store, key, frames, monkeypatch) as call:
        HOW[how](store)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: store.end_count > count)
        assert store.node.grpc.ends[how] > why
    wait_until(store.is_at_rest)
    assert store.read(key) == (content(key) if phase in STORED else None)
    store.serves()
