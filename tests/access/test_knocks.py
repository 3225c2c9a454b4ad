"""Who is not known may knock, and not all the time: refusals take the event loop's time from those who are served."""

import contextlib
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node.serve.knocks import (
    ADDRESSES_MAX,
    BORNE_AT_ONCE,
    BORNE_PER_S,
    KNOCKS_AT_ONCE,
    KNOCKS_PER_S,
    Knocks,
)
from people import People, client, namespace
from waiting import wait_until

from kvstore import Unauthenticated
from node.serve import knocks
from node.server import Node

KEY = b"k" * 32


def test_an_address_has_so_many_at_once_and_so_many_a_second() -> None:
    now = [0.0]
    heard = Knocks(lambda: now[0])
    assert [heard.hear("a") for _ in range(int(KNOCKS_AT_ONCE) + 5)] == [True] * int(KNOCKS_AT_ONCE) + [False] * 5
    assert heard.hear("b")
    now[0] = 1.0
    assert sum(heard.hear("a") for _ in range(100)) == int(KNOCKS_PER_S)


def test_who_knocks_without_pause_is_answered_as_often_as_others() -> None:
    """An answer that he did not get takes nothing of the next one."""
    now = [0.0]
    heard = Knocks(lambda: now[0])
    count = 0
    for step in range(10_000):  # ten seconds, a thousand calls in each
        now[0] = step / 1000
        count += heard.hear("a")
    assert KNOCKS_AT_ONCE + 9 * KNOCKS_PER_S <= count <= KNOCKS_AT_ONCE + 10 * KNOCKS_PER_S


def test_few_addresses_are_remembered() -> None:
    heard = Knocks(lambda: 0.0)
    for number in range(3 * ADDRESSES_MAX):
        heard.hear(str(number))
    assert len(heard._left) == ADDRESSES_MAX


def health(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20.0)


def unknown(channel: grpc.Channel) -> Any:
    call = channel.unary_unary("/kvstore.KVStore/Nothing", lambda data: data, lambda data: data)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=20.0)
    if caught.value.code() is not grpc.StatusCode.UNIMPLEMENTED:
        raise caught.value


def refused(channel: grpc.Channel) -> Any:
    call = channel.unary_unary("/kvstore.KVStore/Hello", lambda data: data, lambda data: data)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=20.0)
    if caught.value.code() is not grpc.StatusCode.UNAUTHENTICATED:
        raise caught.value


@pytest.mark.parametrize("knock", [health, unknown, refused])
def test_who_knocks_all_the_time_is_hung_up_on_and_others_are_served(
    start_node: Any, people: People, knock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knocks, "KNOCKS_PER_S", 0.0)  # a busy machine may make fewer calls than that
    monkeypatch.setattr(knocks, "WAIT_S", 1.0)
    monkeypatch.setattr(knocks, "KNOCKS_PER_S", 0.0)  # a busy machine may make fewer calls than that
    monkeypatch.setattr(knocks, "WAIT_S", 1.0)
    node: Node = start_node(identities=str(people.path), shm_socket="none")
    hang_up, hung_up = node.grpc._servicer.hang_up, []
    node.grpc._servicer.hang_up = lambda name: (hung_up.append(name), hang_up(name))
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (
        client(node, people.tokens["write"], wire="grpc") as engine,
        grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}", options) as channel,
    ):
        engine.lookup(namespace(), [KEY])
        codes = []

        def ended() -> bool:
            try:
                knock(channel)
            except grpc.RpcError as error:
                codes.append(error.code())
            return len(codes) > 0

        wait_until(ended)
        assert codes[0] in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert hung_up
        for _ in range(50):
            engine.lookup(namespace(), [KEY])
        assert engine.stats.connects == 1, "it comes from the same address, and is known"


def test_beyond_that_a_call_waits(start_node: Any, people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knocks, "KNOCKS_AT_ONCE", 0.0)
    monkeypatch.setattr(knocks, "KNOCKS_PER_S", 0.0)
    monkeypatch.setattr(knocks, "WAIT_S", 3600.0)
    node: Node = start_node(identities=str(people.path), shm_socket="none")
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_who_makes_connections_all_the_time_is_banned() -> None:
    """Who waits for no answer does not see that others do not get theirs."""
    now, banned = [0.0], []
    heard = Knocks(lambda: now[0])
    heard.ban = banned.append
    for number in range(int(BORNE_AT_ONCE)):
        heard.meet(str(number), "a")
    for _ in range(10):
        heard.meet("0", "a")
    assert not banned, "one that is there calls as often as it likes"
    heard.meet("one more", "a")
    heard.meet("of another", "b")
    assert banned == ["a"]
    for number in range(int(10 * BORNE_PER_S)):
        now[0] += 1.01 / BORNE_PER_S
        heard.meet(f"later {number}", "a")
    assert banned == ["a"], "so often it may"
    for _ in range(int(BORNE_AT_ONCE)):
        heard.hear("c")
    assert banned == ["a"]
    heard.hear("c")
    assert banned == ["a", "c"], "who is not known, on whatever connections"
    for number in range(2 * ADDRESSES_MAX):
        heard.meet(str(number), str(number))
    assert len(heard._met) == len(heard._left) == ADDRESSES_MAX


@pytest.mark.parametrize("who", ["nobody", "read"])
def test_who_is_banned_makes_no_new_connection_and_others_calls_go_on(
    start_node: Any, people: People, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    monkeypatch.setattr(knocks, "BORNE_PER_S", 0.0)
    monkeypatch.setattr(knocks, "BORNE_AT_ONCE", 1.0)
    node: Node = start_node(identities=str(people.path), shm_socket="none")
    with client(node, people.tokens["write"], wire="grpc") as engine:
        engine.lookup(namespace(), [KEY])
        with client(node, people.tokens[who], wire="grpc") as one_more, contextlib.suppress(Unauthenticated):
            one_more.lookup(namespace(), [KEY])
        with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", node.grpc.port), 0.3):
            pass
        engine.lookup(namespace(), [KEY])
        assert engine.stats.connects == 1


def test_at_an_open_node_nobody_is_known_and_all_are_served(start_node: Any) -> None:
    node = start_node(shm_socket="none")
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        for _ in range(int(2 * KNOCKS_AT_ONCE)):
            health(channel)
