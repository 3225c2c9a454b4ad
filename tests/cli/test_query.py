"""`kvstore query`, and the same over HTTP in the shape of Mooncake's Conductor."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cli_runner import Kvstore
from waiting import wait_until

from kvstore import Client, ClientConfig, Namespace
from kvstore.bridge import http as http_module
from kvstore.bridge.http import BODY_NBYTES_MAX, CONNECTIONS_MAX, Queries, QueryServer
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.prompts import HASHES, Hashing


def test_query_by_hashes(kvstore: Kvstore, space: Namespace, hashes: list[bytes]) -> None:
    ran = kvstore("query", "--model", space.model, *(key.hex() for key in hashes))
    assert ran.code == 0
    assert f"{len(hashes)} blocks, {len(hashes) * space.layout.page_tokens} tokens" in ran.stdout
    ran = kvstore("query", "--model", space.model, hashes[0].hex(), "ee" * 32, "--json")
    (found,) = json.loads(ran.stdout)["results"]
    assert (found["blocks"], found["model"]["model"]) == (1, space.model)
    assert [host["blocks"] for host in found["hosts"]] == [1]
    ran = kvstore("query", "--model", space.model, "ee" * 32)
    assert (ran.code, ran.stdout) == (1, "not even the first block is stored\n")


@pytest.mark.parametrize(
    "arguments", [(), ("zz",), ("ee" * 32, "--tokens", "1"), ("--tokens", "1", "--hash", "md5")]
)
def test_wrong_usage(kvstore: Kvstore, space: Namespace, arguments: tuple[str, ...]) -> None:
    ran = kvstore("query", "--model", space.model, *arguments)
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)


def test_hashes_of_tokens() -> None:
    tokens = list(range(300, 340))
    by_name = {name: Hashing(name, "7").of(tokens, 16) for name in HASHES}
    assert {len(some) for some in by_name.values()} == {2}
    assert len({some[0] for some in by_name.values()}) == len(HASHES)
    with pytest.raises(InvalidRequest):
        Hashing("md5").of(tokens, 16)


@pytest.fixture(scope="module")
def server(shared_node: NodeProcess) -> Iterator[QueryServer]:
    config = ClientConfig(shared_node.address, timeout_s=60.0, connect_timeout_s=30.0)
    with Client(config) as client:
        server = QueryServer("0", Queries(client, "default", "store"))
        server.start()
        yield server
        server.shutdown()
        server.server_close()


def post(server: QueryServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60.0)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_query_over_http(
    server: QueryServer, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    asked = {"model": space.model, "block_size": 4}
    status, found = post(server, "/query", {**asked, "token_ids": list(range(100, 113))})
    assert status == 200
    expected = {"longest_matched": 12, "GPU": 0, "CPU": 12, "DISK": 0}
    assert found["default"].pop("store") == expected
    assert [*found["default"].values()] == [expected]
    (host,) = found["default"]
    short = {**asked, "token_ids": [100, 101, 102]}
    assert post(server, "/query", short) == (200, {"default": {}})
    client.remove(space, hashes[1:2])
    by_hash = {**asked, "seq_hashes": [key.hex() for key in hashes], "instance_id": host}
    status, found = post(server, "/query_by_hash", by_hash)
    assert (status, found) == (
        200,
        {"default": {host: expected | {"longest_matched": 4, "CPU": 4}}},
    )
    assert post(server, "/query_by_hash", {**by_hash, "block_size": 8}) == (200, {"default": {}})
    assert post(server, "/query_by_hash", {**by_hash, "kv": "ff" * 16}) == (200, {"default": {}})
    assert post(server, "/query_by_hash", {**by_hash, "tenant_id": "b"}) == (200, {"b": {}})
    assert [*post(server, "/query_by_hash", {**by_hash, "tenant_id": ""})[1]] == ["default"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/other", {}, 404),
        ("/query", b"no json", 400),
        ("/query", b"[" * 100_000, 400),
        ("/query", [], 400),
        ("/query", {"model": "m", "token_ids": [1]}, 400),
        ("/query", {"model": "m", "token_ids": [1], "block_size": True}, 400),
        ("/query", {"model": "m", "token_ids": [1.5], "block_size": 1}, 400),
        ("/query", {"model": "m", "token_ids": [-1], "block_size": 1}, 400),
        ("/query", {"model": "m", "token_ids": [1], "block_size": 1, "cache_salt": "s"}, 400),
        ("/query_by_hash", {"model": "m", "block_size": 1, "seq_hashes": [12345]}, 400),
        ("/query_by_hash", {"model": "m", "block_size": 1, "seq_hashes": ["zz"]}, 400),
        ("/query_by_hash", {"model": "m", "block_size": 1, "seq_hashes": ["ab"]}, 400),
        ("/query_by_hash", {"model": 1, "block_size": 1, "seq_hashes": []}, 400),
    ],
)
def test_wrong_requests_over_http(server: QueryServer, path: str, body: Any, status: int) -> None:
    answer, told = post(server, path, body)
    assert (answer, [*told]) == (status, ["error"])


def test_large_bodies_are_refused_unread(server: QueryServer) -> None:
    for length in (str(BODY_NBYTES_MAX + 1), "9" * 100):
        assert post(server, "/query", b"", **{"Content-Length": length})[0] == 413
    assert post(server, "/query", bytes(2 * BODY_NBYTES_MAX))[0] == 413, "the reply is not lost"
    assert post(server, "/query", b"", **{"Content-Length": "-1"})[0] == 411
    chunks = {"Transfer-Encoding": "chunked", "Content-Length": "2"}
    assert post(server, "/query", b"2\r\n{}\r\n0\r\n\r\n", **chunks)[0] == 411


def test_pages_in_browsers_may_not_ask(server: QueryServer) -> None:
    asked = {"model": "m", "block_size": 4, "token_ids": [1] * 4}
    for origin in ("http://rebound.example", "null"):
        assert post(server, "/query", asked, Origin=origin)[0] == 403
    assert post(server, "/query", asked)[0] == 200


def test_replies_do_not_wait_for_acks(server: QueryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    delays, send = [], http_module._Handler._send

    def sent(handler: http_module._Handler, *reply: Any) -> None:
        delays.append(not handler.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        send(handler, *reply)

    monkeypatch.setattr(http_module._Handler, "_send", sent)
    post(server, "/query", {})
    assert delays == [False]


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST /query HTTP/1.1\r\nA: ", b"POST /query HTTP/1.1\r\nContent-Length: 999\r\n\r\n"],
)
def test_trickling_clients_are_cut_off(
    server: QueryServer, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http_module, "REQUEST_S_MAX", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), 60.0) as client:
        client.sendall(begun)

        def is_cut() -> bool:
            try:
                client.sendall(b"a")
                return not client.recv(1)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        client.settimeout(0.05)
        wait_until(is_cut)


def test_connection_without_a_thread_takes_no_place(
    server: QueryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(CONNECTIONS_MAX):
            with socket.socket() as client, pytest.raises(RuntimeError):
                server.process_request(client, ("127.0.0.1", 1))
    assert post(server, "/query", {})[0] == 400


def test_many_clients_connect_at_once(client: Client) -> None:
    server = QueryServer("0", Queries(client, "default", "store"))  # accepts none yet
    address = ("127.0.0.1", server.server_port)
    try:
        clients = [socket.create_connection(address, 60.0) for _ in range(CONNECTIONS_MAX)]
        for one in clients:
            one.close()
    finally:
        server.server_close()


@pytest.mark.parametrize("listen", ["x", "1.2.3.4:80", "70000", "127.0.0.1:-1"])
def test_wrong_http_addresses(client: Client, listen: str) -> None:
    with pytest.raises(ConfigError):
        QueryServer(listen, Queries(client, "default", "store"))


def test_ipv6_addresses_are_told_as_urls_have_them(client: Client) -> None:
    server = QueryServer("0", Queries(client, "default", "store"))
    server.server_address = ("::1", 80, 0, 0)  # this host may have no IPv6
    try:
        assert server.start() == "[::1]:80"
    finally:
        server.shutdown()
        server.server_close()
