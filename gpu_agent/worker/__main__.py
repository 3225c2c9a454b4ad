"""Run a worker process: `python -m gpu_agent.worker DESCRIPTOR`, started by an engine's adapter.

It carries out saves and loads, or makes lookups for a scheduler. It ends with the engine: by CLOSE,
when the engine hangs up or dies, and by the kernel's SIGKILL if it is stopped then. It ends at
once, because pages that are not stored are computed again, and the node frees what the process
held. An invalid frame ends it too; the engine starts another process.
"""

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys

import kvstore.otel as spans
from gpu_agent.worker import frames
from gpu_agent.worker.frames import AgentsEnd, Kind
from kvstore.errors import ConfigError, KVStoreError, ProtocolError

log = logging.getLogger("gpu_agent.worker")

# By the name of the `Delegate`. Imported when the task is known: agents need torch, lookups do not
# and start at once.
_TASKS = {
    "agents": ("gpu_agent.worker.agent_worker", "AgentWorker"),
    "lookups": ("gpu_agent.worker.lookup_worker", "LookupWorker"),
}
# Its threads copy, call and verify in slices of 100 us. With Python's 5 ms each would wait for the
# others.
SWITCH_S = 0.0002
_PR_SET_PDEATHSIG = 1
_ENDED, _BROKEN = 0, 1


def main(descriptor: int) -> None:
    """Serve the engine at the other end of the socket `descriptor`.

    Does not return.
    """
    engine = os.getppid()
    logging.basicConfig(format="%(levelname)s %(name)s [%(process)d]: %(message)s")
    code = _BROKEN
    try:
        channel = AgentsEnd(socket.socket(fileno=descriptor), engine)
        kind, body = channel.receive()
        setup = frames.parse_facts(body)
        if (
            kind is not Kind.SETUP
            or setup.get("engine") != engine
            or setup.get("task") not in _TASKS
        ):
            raise ProtocolError("no setup by the process that started this one")
        if setup.get("outlived"):  # started by a thread that lives until the engine ends
            # For an engine that dies while this process is stopped
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.setswitchinterval(SWITCH_S)
        logging.getLogger().setLevel(setup.get("log_level", logging.WARNING))
        _trace()
        file, name = _TASKS[setup["task"]]
        getattr(importlib.import_module(file), name)(channel, setup).run()
        code = _ENDED
    except ConnectionError as error:
        log.debug("%s", error)
    except KVStoreError as error:
        log.error("%s", error)
    except Exception:  # end of the process: after any error, the engine starts another
        log.exception("a worker process failed")
    # Without the interpreter's shutdown, which waits for threads that may be waiting for a node.
    logging.shutdown()
    os._exit(code)


def _trace() -> None:
    """Set up traces.

    The process works without them, too.
    """
    try:
        spans.set_up("kvstore-agent")
    except ConfigError as error:
        log.warning("no traces: %s", error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
