"""Check a container's health: exit 0 if this node serves, 1 with a line on stderr if not.

It asks /health at the metrics port, not grpc.health.v1 at the gRPC port: a gateway process that
crashed is back within a second, and the node serves other clients meanwhile. Ports and TLS files
come from the environment (KVSTORE_NODE_PORT), as for a node in a container; flags are not seen.
Like a kubelet's probe it does not verify the node's certificate. It shows the node's certificate to
a node that requires client certificates. A node that refuses it is running, so it counts as
healthy: a damaged certificate file must not end the node.
"""

import http.client
import socket
import ssl
import sys

from kvstore import programs
from kvstore.config import load
from kvstore.errors import ConfigError

programs.search()  # the image has the wheel

from node.config import NodeConfig  # noqa: E402

DEADLINE_S = 3.0  # below the 5 s after which Docker kills the check without a message


def main() -> int:
    """Run the command line."""
    try:
        config = load(NodeConfig, "KVSTORE_NODE", {})
    except ConfigError as error:
        return _unhealthy(str(error))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    address = f"{'[' + host + ']' if ':' in host else host}:{config.metrics_port}"
    try:
        with socket.create_connection((host, config.metrics_port), DEADLINE_S) as plain:
            sock = _context(config).wrap_socket(plain) if config.tls_cert else plain
            status, said = _asked(sock, host, config)
    except (OSError, http.client.HTTPException) as error:
        return _unhealthy(f"{address}: {error or type(error).__name__}")
    return 0 if status == 200 else _unhealthy(f"{address}: {status} {said}")


def _asked(sock: socket.socket, host: str, config: NodeConfig) -> tuple[int, str]:
    """Return the status of /health, and its text.

    Raise OSError or HTTPException.
    """
    connection = http.client.HTTPConnection(host, config.metrics_port)
    connection.sock = sock
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, answer.read(200).decode(errors="replace").strip()
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        if not config.tls_client_ca:
            raise
        # In TLS 1.3 the handshake ends here before the node has verified the certificate.
        print(
            f"the node hung up; it may refuse the certificate in {config.tls_cert}: {error}",
            file=sys.stderr,
        )
        return 200, ""
    finally:
        connection.close()


def _context(config: NodeConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if config.tls_client_ca:
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except OSError as error:
            print(
                f"{config.tls_cert} and {config.tls_key} can not be shown: {error}", file=sys.stderr
            )
    return context


def _unhealthy(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
