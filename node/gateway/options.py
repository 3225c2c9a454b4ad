"""Configure gRPC's server: options, certificates, and an orderly stop."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.certificates import Pems
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import ConfigError
from node.serve.limits import REQUEST_S_MAX

STREAMS_OF_CONNECTION_MAX = 32  # calls at a time of one connection; more wait at the client
# What a caller may send on a stream before anybody reads it. gRPC would find out by pings how much the way holds, and
# who answers them late would get half a GiB.
STREAM_NBYTES_MAX = MESSAGE_NBYTES_MAX
METADATA_NBYTES_MAX = 8 << 10
# No compression: unpacking would spend time and memory on clients without a credential. All releases since 1.62.3
# refuse a call with compressed messages by its headers (UNIMPLEMENTED).
IDENTITY_ONLY = 1
# The first release that stops unpacking at the limit of a message (found by sending it 60 MiB in 59 KiB). Older ones
# unpack all, up to 2 GiB out of 2 MB, and then compare. 1.83.0 was released without that change.
GRPCIO_MIN = (1, 82, 2)
GRPCIO_WITHOUT = ((1, 83, 0),)
LOOK_S = 0.5


def check_grpcio(version: str = grpc.__version__) -> None:
    """Raise ConfigError for a grpcio that unpacks compressed messages without a limit."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found else ()
    if numbers >= GRPCIO_MIN and numbers not in GRPCIO_WITHOUT:
        return
    oldest, without = ".".join(map(str, GRPCIO_MIN)), ".".join(map(str, GRPCIO_WITHOUT[0]))
    raise ConfigError(
        f"grpcio {version} unpacks compressed messages without a size limit; a node needs grpcio {oldest} or "
        f"newer, not {without}: pip install 'grpcio>={oldest},!={without}'. Where an engine needs an older one, "
        "run the node in an environment of its own"
    )


def server_options(connections_max: int) -> list[tuple[str, int]]:
    """Return options for a gRPC server that takes at most `connections_max` connections, and closes more."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
        ("grpc.so_reuseport", 1),  # the node holds the port, and all its gateways listen there
        ("grpc.max_concurrent_streams", STREAMS_OF_CONNECTION_MAX),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_NBYTES_MAX),
        ("grpc.max_metadata_size", METADATA_NBYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_NBYTES_MAX),
        # A chunk comes in one frame of HTTP/2: in 64, a put takes a sixth more of the processor time.
        ("grpc.http2.max_frame_size", MESSAGE_NBYTES_MAX),
        # A connection that says nothing, or half of HTTP/2's greeting.
        ("grpc.server_handshake_timeout_ms", int(REQUEST_S_MAX * 1000)),
        ("grpc.http2.settings_timeout", int(REQUEST_S_MAX * 1000)),
        ("grpc.max_allowed_incoming_connections", connections_max),
    ]


def server_credentials(pems: Callable[[], Pems]) -> grpc.ServerCredentials:
    """Return credentials that ask `pems` at each handshake for what is in force.

    Python's gRPC either requires a client certificate or asks for none, and has no setting for the version of TLS:
    between our own sides it is 1.3, as `tests/node/test_tls.py` sees.
    """
    given = pems()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates in force; None: unchanged since the last handshake."""
        nonlocal given
        if pems() is given:
            return None
        given = pems()
        return _configuration(given)

    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, bool(given.roots))


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.roots or None)


async def stopped(server: Any, drain_s: float, call_count: Callable[[], int]) -> None:
    """Stop a gRPC server. Running calls have `drain_s`, then they are cancelled.

    `call_count` counts the calls whose handlers run. gRPC may accept a call while it stops and start no handler for it,
    then wait for it all the time: such calls are cancelled once no handler has run for `LOOK_S`.
    """
    stopping = asyncio.ensure_future(server.stop(drain_s))
    left = True
    while not (await asyncio.wait([stopping], timeout=LOOK_S))[0]:
        if not left and not call_count():
            await server.stop(None)
        left = call_count() > 0
    await stopping
