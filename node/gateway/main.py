"""Run `kvstore-gateway`: a process that serves gRPC for the node that starts and watches it.

It has two sockets to the node and the node's certificate and key. It has no page memory, no disk
and no identities, and at its start it gives up all rights that it does not need
(`node.gateway.sandbox`).
"""

import argparse
import ctypes
import logging
import os
import resource
import signal
import socket
import threading
import time

from node.gateway import sandbox
from node.gateway.control import EXIT_MEMORY
from node.gateway.gateway import Gateway, rss_nbytes, serve
from node.process import set_up_log, yield_memory_first

log = logging.getLogger(__name__)

WATCH_S = 0.02
NICENESS = 10  # if CPU time is short, engines on the node's other ports come first
_PARENT_DEATH_SIGNAL = 1  # of prctl


def _watch_memory(nbytes_max: int) -> None:
    """End this process when it has more than `nbytes_max`.

    gRPC can not be made to release memory.
    """
    while True:
        nbytes = rss_nbytes()
        if nbytes > nbytes_max:
            os.write(
                2,
                f"kvstore-gateway: {nbytes} bytes of memory, at most {nbytes_max}: it "
                "ends\n".encode(),
            )
            os._exit(EXIT_MEMORY)
        time.sleep(WATCH_S)


def main() -> None:
    """Run a gateway process."""
    parser = argparse.ArgumentParser(
        "kvstore-gateway", description="Serves gRPC for a node, which starts it."
    )
    parser.add_argument("--control-fd", type=int, required=True, help="inherited from kvstore-node")
    parser.add_argument("--door-fd", type=int, required=True, help="inherited from kvstore-node")
    parser.add_argument("--port", type=int, required=True, help="on which it listens")
    parser.add_argument("--ipv6", action="store_true", help="its address is one of IPv6")
    parser.add_argument("--memory-bytes", type=int, required=True, help="it ends if it has more")
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # the node gets them, too, and tells this process when to end
        signal.signal(number, signal.SIG_IGN)
    set_up_log(arguments.log_level, arguments.log_format)
    _end_with_node()
    os.nice(NICENESS)
    # Before the node, whose arena counts in full
    yield_memory_first()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would have callers' data
    rss_nbytes()  # opens the file that it reads
    try:
        if not sandbox.enter(arguments.port, arguments.ipv6):
            log.warning("the gateway may read the files of its user: this system has no Landlock")
    except OSError as error:
        log.warning("the gateway keeps rights of its user: %s", error)
    threading.Thread(
        target=_watch_memory, args=(arguments.memory_bytes,), name="memory", daemon=True
    ).start()
    sockets = [socket.socket(fileno=fd) for fd in (arguments.control_fd, arguments.door_fd)]
    serve(Gateway(*sockets))
    logging.shutdown()
    os._exit(0)  # without waiting for gRPC's threads


def _end_with_node() -> None:
    """Make the kernel kill this process when the node ends: a restarted node needs the port."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL):
        log.info("a killed node's port is free only when its gateway has noticed")


if __name__ == "__main__":
    main()
