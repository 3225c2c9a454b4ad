"""What the process does that an engine's adapter has started: carry out orders for blocks, or ask the store.

It ends with the engine: by CLOSE, when the engine hangs up or dies, and by SIGKILL from the system when it
stands still then. Ending at once is right: what is not stored is computed again, and the node takes back
what the process held. Anything that does not fit ends it too; the engine starts another.
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

log = logging.getLogger(__name__)

# By the name of their `Owner`. Imported when it is known which: the agents' needs torch, the lookups' is there at once.
_TASKS = {
    "agents": ("gpu_agent.worker.agent_worker", "AgentWorker"),
    "lookups": ("gpu_agent.worker.lookup_worker", "LookupWorker"),
}
# Its threads copy, ask and verify by turns of 100 us; with Python's 5 ms each would wait for the others.
SWITCH_S = 0.0002
_PR_SET_PDEATHSIG = 1
_ENDED, _BROKEN = 0, 1


def main(descriptor: int) -> None:
    """Serves the engine at the other end of the socket `descriptor`. Does not return."""
    engine = os.getppid()
    logging.basicConfig(format="%(levelname)s %(name)s [%(process)d]: %(message)s")
    code = _BROKEN
    try:
        channel = AgentsEnd(socket.socket(fileno=descriptor), engine)
        kind, body = channel.receive()
        setup = frames.parse_facts(body)
        if kind is not Kind.SETUP or setup.get("engine") != engine or setup.get("task") not in _TASKS:
            raise ProtocolError("no setup by the process that started this one")
        if setup.get("outlived"):  # by the thread that started us, until the engine ends
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # for one that dies while we are stopped
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
    except Exception:  # the edge of the process: whatever broke, the engine starts another
        log.exception("a process beside the engine broke")
    # Not by way of the interpreter's end, which waits for threads that may be waiting for a node.
    logging.shutdown()
    os._exit(code)


def _trace() -> None:
    """Without traces it does all else."""
    try:
        spans.set_up("kvstore-agent")
    except ConfigError as error:
        log.warning("no traces: %s", error)
