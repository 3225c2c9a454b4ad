"""The address under which the others reach this node: told or guessed, and tried before anybody hears of it."""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.config import BULK_SCHEME, ClientConfig, check_no_url, is_loopback, parse_address, split_address
from kvstore.credentials import check_stays_private, token_of
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, KVStoreError, ProtocolError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.addresses import Addresses, grpc_target
from kvstore.wires.bulk_connector import BulkConnector
from kvstore.wires.connections import Refused
from kvstore.wires.grpc_wire import GrpcWire
from kvstore.wires.tls import PROBE_S, client_tls, why_not

WILDCARDS = ("", "0.0.0.0", "::")
TRY_S = 2.0
TRIED_S = 5.0
PAUSE_S = 0.2


def advertised(told: str, host: str, port: int, towards: Sequence[str], scheme: str = "") -> str:
    """`told` as it is, with this node's port if it names none; else where it listens; else the address with which this
    host reaches others, `towards` one of which it must. `scheme`: that of `port`, empty for gRPC's."""
    if told:
        return with_port(told, port, scheme)
    if host in WILDCARDS:
        host = _own_address(towards)
    return scheme + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def with_port(told: str, port: int, scheme: str = "") -> str:
    """This one, with its `scheme`, if none is told. Raises ConfigError."""
    if told.startswith(BULK_SCHEME):
        split_address(told)
        return told
    check_no_url("advertise", told)
    named = told.rpartition(":")[2].isdigit() and (told.count(":") == 1 or "]:" in told)
    bare = told.count(":") > 1 and not told.startswith("[")  # an IPv6 address, as a pod is told its own
    address = told if named else scheme + (f"[{told}]:{port}" if bare else f"{told}:{port}")
    try:
        split_address(address)
    except ConfigError as error:
        raise ConfigError(f"advertise={told!r} is not host:port") from error
    return address


def _own_address(towards: Sequence[str]) -> str:
    """Connecting a datagram socket sends nothing; it finds the way."""
    for address in towards:
        host, port = split_address(address)
        with contextlib.suppress(OSError):
            for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
                    sock.connect(where)
                    return str(sock.getsockname()[0])
    raise ConfigError("no address of this host is known that others could reach; name one with advertise (--advertise)")


def check_listens(host: str, address: str) -> None:
    """Raises ConfigError for a member that others reach at `address`, and that listens for its own host only."""
    named = split_address(address)[0]
    with contextlib.suppress(ValueError):  # what a name means is for a resolver
        if is_loopback(host) and not ipaddress.ip_address(named).is_loopback:
            raise ConfigError(
                f"others reach this member at {address}, and with host={host} it listens for its own host only; "
                f"name an address to listen on (--host {named}, or 0.0.0.0), with TLS and identities (docs/SECURITY.md)"
            )


def check_address(
    address: str, instance_id: bytes, pulse: Callable[[], None], known_by: Mapping[str, Any] | None = None
) -> None:
    """This node asks itself back through it. Raises ConfigError if another answers, or nobody within TRIED_S.
    `known_by`: fields of a ClientConfig."""
    end = time.monotonic() + TRIED_S
    remedy = "name one by which the others reach it, with advertise (--advertise HOST:PORT)"
    while True:
        pulse()
        try:
            found = _instance_at(ClientConfig(address=address, **(known_by or {})))
            break
        except KVStoreError as error:
            if isinstance(error, (ProtocolError, ConfigError)) or time.monotonic() >= end:
                raise ConfigError(f"this node does not reach itself at {address}: {error}; {remedy}") from error
            time.sleep(PAUSE_S)
    if found != instance_id:
        raise ConfigError(f"at {address} another node answers, not this one; {remedy}")


def instance_at(address: str, known_by: Mapping[str, Any]) -> bytes:
    """Return the instance id of the node at an address, empty if none answers within TRY_S.

    `known_by` as above.
    """
    try:
        return _instance_at(ClientConfig(address=address, **known_by))
    except KVStoreError:
        return b""


def _instance_at(config: ClientConfig) -> bytes:
    scheme, host, port, _ = parse_address(config.address)
    limit = Deadline(TRY_S)
    tls, found = client_tls(config, host), Addresses(host).resolve(limit)
    token = token_of(config)
    check_stays_private(token, config, found)
    if scheme == "bulk":
        return _instance_by_frames(BulkConnector(host, port, config, found, tls), limit)
    wire = GrpcWire(grpc_target(found, port), config.address, tls, token)
    try:
        return bytes(wire.call("hello", pb.HelloRequest(), limit).instance_id)
    except Unavailable as error:
        if said := why_not(found, port, tls, PROBE_S):
            raise Unavailable(said) from error
        raise
    finally:
        wire.close()


def _instance_by_frames(connector: BulkConnector, limit: Deadline) -> bytes:
    try:
        connection, hello = connector.connect(limit, only_asks=True)
    except Refused as error:
        raise error.error from None
    except OSError as error:
        raise Unavailable(f"connection to {connector.where} failed: {error}") from error
    connection.close()
    return bytes(hello.instance_id)
