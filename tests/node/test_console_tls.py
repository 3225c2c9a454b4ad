"""The console of a node with TLS that identifies people by client certificates."""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest
from authorities import client_context, of_node, pair
from local_nodes import StartNode
from visits import OWN, connection, events

from kvstore.cli.authority import Authority
from kvstore.security.identities import add, certificate_line
from node.server import Node


@pytest.fixture(scope="module")
def node(start_node: StartNode, ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Node:
    identities = tmp_path_factory.mktemp("tls") / "identities"
    add(identities, certificate_line("team-a", tenant="team-a", role="read"))
    return start_node(**of_node(ours), identities=str(identities))


def test_console_accepts_a_client_certificate(node: Node, ours: Authority) -> None:
    shown = client_context(ours, **pair(ours, "client"))
    there = connection(node, shown)
    there.request("POST", "/console/events", b"{}", OWN)
    reply = there.getresponse()
    stream = events(reply)
    name, values = next(stream)
    assert (name, values["who"]["tenant"], values["who"]["name"]) == ("now", "team-a", "team-a")
    assert next(stream)[0] == "now"
    reply.close()
    there.close()


def test_another_sites_page_cannot_use_the_certificate(node: Node, ours: Authority) -> None:
    """A browser presents its certificate for requests from any page."""
    there = connection(node, client_context(ours, **pair(ours, "client")))
    there.request("POST", "/console/act", b'{"act":"flush"}', {"Content-Type": "text/plain"})
    reply = there.getresponse()
    assert reply.status == 403
    assert b"only the console's own page" in reply.read()
    there.close()


def test_tls_request_with_a_late_body_is_answered(node: Node, ours: Authority) -> None:
    """Bytes that TLS has already decrypted make no event on the socket."""
    there = connection(node, client_context(ours, **pair(ours, "client")))
    body = json.dumps({"namespace": "ab" * 16, "key": "abcd", "filler": "x" * 3000}).encode()
    there.putrequest("POST", "/console/look-up")
    for header, value in {**OWN, "Content-Length": str(len(body))}.items():
        there.putheader(header, value)
    there.endheaders()
    for start in range(0, len(body), 500):
        there.send(body[start : start + 500])
    reply = there.getresponse()
    assert (reply.status, b"is not open here" in reply.read()) == (404, True)
    there.close()


def test_files_larger_than_a_tls_record_arrive_whole(node: Node, ours: Authority) -> None:
    for name in ("board.js", "style.css"):
        there = connection(node, client_context(ours, **pair(ours, "client")))
        there.request("GET", f"/console/{name}")
        assert (
            there.getresponse().read()
            == (Path(__file__).parents[2] / "node" / "console" / name).read_bytes()
        )
        there.close()


def test_trickling_handshake_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 0.5)
    with socket.create_connection(("127.0.0.1", node.metrics.port), 20.0) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        began, taken = time.monotonic(), 0
        with contextlib.suppress(ConnectionError):
            while taken < 400:  # of the 512 announced bytes
                sock.sendall(b"x")
                time.sleep(0.02)
                taken += 1
    assert taken < 400
    assert time.monotonic() - began < 5.0
