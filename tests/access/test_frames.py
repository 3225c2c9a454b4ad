"""Tokens on frame addresses (bulk:// and unix:): accepted and refused clients, and targets to which
a client sends no token.
"""

import socket
from typing import Any

import pytest
from authorities import of_node, pair
from local_nodes import StartNode
from people import PAGE_NBYTES, People, namespace

from kvstore import Client, ClientConfig, ConfigError, Forbidden, PutOutcome, Unauthenticated
from kvstore.cli.authority import Authority
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from kvstore.transports.status import Code
from kvstore.transports.unix_sockets import connected
from node.server import Node

KEY = b"f" * 32
PAGE = bytes(PAGE_NBYTES)


def by_frames(node: Node) -> str:
    return f"bulk://127.0.0.1:{node.bulk.port}"


def by_socket(node: Node) -> str:
    assert node.shm is not None
    return f"unix:{node.shm.path}"


def client(address: str, token: str, **settings: Any) -> Client:
    return Client(
        ClientConfig(address, timeout_s=60.0, connect_timeout_s=30.0, token=token, **settings)
    )


@pytest.mark.parametrize(
    ("at", "wire", "taken"),
    [(by_frames, "bulk", "bulk"), (by_frames, "auto", "shm"), (by_socket, "auto", "shm")],
)
def test_token_is_accepted_at_frame_addresses(
    node: Node, people: People, at: Any, wire: str, taken: str
) -> None:
    space = namespace(revision=f"{taken} {wire} {at.__name__}")
    with client(at(node), people.tokens["write"], wire=wire) as writer:
        assert writer.put(space, [KEY], [PAGE]) == [PutOutcome.STORED]
        assert writer.wire_name == taken
        with pytest.raises(Forbidden):
            writer.flush()


@pytest.mark.parametrize("at", [by_frames, by_socket])
@pytest.mark.parametrize("name", ["nobody", "wrong", "revoked", "expired"])
def test_frames_without_identity_are_refused(
    node: Node, people: People, at: Any, name: str
) -> None:
    with client(at(node), people.tokens[name]) as stranger, pytest.raises(Unauthenticated):
        stranger.node_status()


def test_untrusted_shm_client_gets_the_tcp_address(node: Node, people: People) -> None:
    with (
        client(by_socket(node), people.tokens["other"]) as other,
        pytest.raises(
            Forbidden,
            match=r"--shm-trust\); name the node.s address of TCP instead, bulk://HOST:7441",
        ),
    ):
        other.node_status()
    with client(by_frames(node), people.tokens["other"]) as other:
        assert other.node_status().instance_id
        assert other.wire_name == "bulk"


@pytest.mark.parametrize("address", ["192.0.2.7:7440", "bulk://192.0.2.7:7441"])
def test_token_is_not_sent_unencrypted_to_another_host(address: str) -> None:
    with (
        client(address, "team-a.secret") as abroad,
        pytest.raises(ConfigError, match="cross the network unencrypted"),
    ):
        abroad.node_status()


def test_token_is_sent_over_a_local_socket(
    start_node: StartNode, people: People, ours: Authority
) -> None:
    """A client sends its token over a local socket, whether or not the node's TCP ports use TLS."""
    node = start_node(identities=str(people.path), shm_trust="team-a", **pair(ours, "node"))
    with client(by_socket(node), people.tokens["write"]) as writer:
        assert writer.put(namespace(revision="by socket"), [KEY], [PAGE]) == [PutOutcome.STORED]


def test_token_is_accepted_over_tls_at_a_frame_address(
    start_node: StartNode, people: People, ours: Authority
) -> None:
    node = start_node(identities=str(people.path), **of_node(ours))
    settings = {"tls_ca": str(ours.path), **pair(ours, "client"), "wire": "bulk"}
    with client(by_frames(node), people.tokens["write"], **settings) as writer:
        assert writer.put(namespace(revision="over tls"), [KEY], [PAGE]) == [PutOutcome.STORED]


def test_follow_without_identity_is_refused(node: Node, people: People) -> None:
    """A follow frame is authorized like any request.

    Only a known caller gets the error that the node is in no cluster.
    """
    with socket.create_connection(("127.0.0.1", node.bulk.port)) as sock:
        stranger = FrameSocket(sock)
        stranger.arm(20.0)
        stranger.send_frame(
            pb.BulkRequest(follow=pb.FollowRequest(wait_ms=1000)).SerializeToString()
        )
        assert (
            pb.BulkReply.FromString(stranger.recv_frame(1 << 16)[0]).error.code
            == Code.UNAUTHENTICATED
        )
    with socket.create_connection(("127.0.0.1", node.bulk.port)) as sock:
        reader = FrameSocket(sock)
        reader.arm(20.0)
        hello = pb.HelloRequest(token=people.tokens["read"])
        for request in (
            pb.BulkRequest(hello=hello),
            pb.BulkRequest(follow=pb.FollowRequest(wait_ms=1000)),
        ):
            reader.send_frame(request.SerializeToString())
            reply = pb.BulkReply.FromString(reader.recv_frame(1 << 16)[0])
        assert reply.error.code == Code.INVALID_ARGUMENT


def test_unix_socket_needs_a_process_descriptor(node: Node) -> None:
    """Frames on the Unix socket are refused without the process descriptor of shared memory."""
    assert node.shm is not None
    with connected(node.shm.path, 10.0) as sock:
        bare = FrameSocket(sock)
        bare.arm(20.0)
        bare.send_frame(pb.BulkRequest(follow=pb.FollowRequest()).SerializeToString())
        assert pb.BulkReply.FromString(bare.recv_frame(1 << 16)[0]).error.code == Code.UNIMPLEMENTED
