"""Health check of a container: exit 0 if this node serves, 1 with a line on stderr if not.

Asks grpc.health.v1, the service that orchestrators ask too, so a node that drains or has stopped
answering is not healthy although its process runs. Ports are found as the node finds them, so a
node in a container gets them from the environment (KVSTORE_NODE_PORT), not from flags.
"""

import sys

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
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return _unhealthy(f"{address}: {error.code().name}: {error.details()}")
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        return _unhealthy(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}")
    return 0


def _unhealthy(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
