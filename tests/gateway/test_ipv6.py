"""A gateway in its sandbox serves IPv6, although gRPC probes for IPv6 before it listens."""

import socket

import grpc
import pytest
from fleets import SMALL

from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.config import NodeConfig
from node.server import Node


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize(("host", "reached"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
def test_gateway_listens_on_ipv6_addresses(host: str, reached: list[str]) -> None:
    node = Node(NodeConfig(**{**SMALL, "host": host, "insecure": True}), gateway_processes=True)
    node.start()
    try:
        for address in reached:
            with grpc.insecure_channel(f"{address}:{node.grpc.port}") as channel:
                reply = KVStoreStub(channel).Hello(
                    pb.HelloRequest(), timeout=30.0, wait_for_ready=True
                )
                assert reply.instance_id == node.service.instance_id
    finally:
        node.stop()
