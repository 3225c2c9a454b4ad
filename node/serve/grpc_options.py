"""What gRPC's server is told at its start: sizes, times, and how much a caller may send before anybody reads it."""

from kvstore.config import MESSAGE_NBYTES_MAX
from node.serve.limits import REQUEST_S_MAX

STREAMS_OF_CONNECTION_MAX = 32  # calls at a time of one connection; more wait at the client
# What a caller may send on a stream before anybody reads it. gRPC would find out by pings how much the way holds, and
# who answers them late would get half a GiB.
STREAM_NBYTES_MAX = MESSAGE_NBYTES_MAX
METADATA_NBYTES_MAX = 8 << 10
CONNECTIONS_MAX = 4096


def server_options(connections_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.so_reuseport", 0),  # a second node on the same port must fail, not share it
        ("grpc.max_concurrent_streams", STREAMS_OF_CONNECTION_MAX),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_NBYTES_MAX),
        ("grpc.max_metadata_size", METADATA_NBYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_NBYTES_MAX),
        # A chunk comes in one frame of HTTP/2: in 64, a put takes a sixth more of the node's processor time.
        ("grpc.http2.max_frame_size", MESSAGE_NBYTES_MAX),
        # A connection that says nothing, or half of HTTP/2's greeting.
        ("grpc.server_handshake_timeout_ms", int(REQUEST_S_MAX * 1000)),
        ("grpc.http2.settings_timeout", int(REQUEST_S_MAX * 1000)),
        # The last resort against who is quicker than GrpcConnections looks; older versions do not know it.
        ("grpc.max_allowed_incoming_connections", max(CONNECTIONS_MAX, 2 * connections_max)),
    ]
