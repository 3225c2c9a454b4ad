"""Health check of a container: exit 0 if this node serves, 1 with a line on stderr if not.

Asks grpc.health.v1, the service that orchestrators ask too, so a node that drains or has stopped
answering is not healthy although its process runs. Ports and files of TLS are found as the node finds them, so a
node in a container gets them from the environment (KVSTORE_NODE_PORT), not from flags. Of a node with TLS its own
certificate is believed and shown, whatever name stands in it.
"""

import socket
import ssl
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.config import load
from kvstore.errors import ConfigError
from node.config import NodeConfig

DEADLINE_S = 3.0  # below the 5 s after which Docker kills the check: then it would say nothing


def main() -> int:
    try:
        config = load(NodeConfig, "KVSTORE_NODE", {})
    except ConfigError as error:
        return _unhealthy(str(error))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    address = f"{'[' + host + ']' if ':' in host else host}:{config.port}"
    try:
        made = _secured(config, host, address) if config.tls_cert else grpc.insecure_channel(address)
    except OSError as error:
        return _unhealthy(f"{address}: {error}")
    with made as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return _unhealthy(f"{address}: {error.code().name}: {error.details()}")
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        return _unhealthy(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}")
    return 0


def _secured(config: NodeConfig, host: str, address: str) -> grpc.Channel:
    """Raises OSError."""
    context = ssl.create_default_context(cafile=config.tls_cert)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # this very certificate will do
    context.check_hostname = False
    context.load_cert_chain(config.tls_cert, config.tls_key)
    context.set_alpn_protocols(["h2"])
    sock = socket.create_connection((host, config.port), DEADLINE_S)
    with context.wrap_socket(sock) as greeted:
        names = (greeted.getpeercert() or {}).get("subjectAltName", ())
    certificate, key = Path(config.tls_cert).read_bytes(), Path(config.tls_key).read_bytes()
    credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
    name = next((str(value) for _, value in names), host)
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])


def _unhealthy(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
