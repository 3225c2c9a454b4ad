"""`kvstore query`, and the same over HTTP in the shape of Mooncake's Conductor."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cli_runner import Kvstore

from kvstore import Client, ClientConfig, Namespace
from kvstore.bridge.http import BODY_NBYTES_MAX, Queries, QueryServer
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
        ("/query", {"model": "m", "token_ids": [1], "block_size": 4}, 400),
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
    assert post(server, "/query", b"", **{"Content-Length": "-1"})[0] == 411


@pytest.mark.parametrize("listen", ["x", "1.2.3.4:80", "70000", "127.0.0.1:-1"])
def test_wrong_http_addresses(client: Client, listen: str) -> None:
    with pytest.raises(ConfigError):
        QueryServer(listen, Queries(client, "default", "store"))
