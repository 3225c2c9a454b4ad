"""Inject faults of the store at chosen calls inside an engine's process.

    lookup   the client is about to look up pages
    load     the client is about to fetch pages, or to open them in the node's memory
    save     the client is about to store pages, or to reserve slots in the node's memory
    commit   pages are written to the node's memory and are about to become visible

A fault waits for the `nth` such call after it was armed. Just before that call it acts:

    kill     kill the node
    stop     stop the node with SIGSTOP, so that it no longer answers
    die      stop the node, and kill it 0.2 s later while the call waits for its answer
    forget   remove page number `page` of the call's chain, as an eviction would
    slow     wait `seconds`

With `tp_rank`, only calls for that rank's pages count. Only the client's methods are wrapped; the
engine and the adapter are unchanged.
"""

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.client import Client
from kvstore.transports.mapped_memory import ReservedSlots

DYING_S = 0.2
MOMENTS = {
    "lookup": ((Client, "lookup"),),
    "load": ((Client, "get"), (Client, "open_get")),
    "save": ((Client, "put"), (Client, "open_put")),
    "commit": ((ReservedSlots, "commit"),),
}


@dataclass
class Fault:
    at: str
    do: str
    nth: int = 1
    node_pid: int = 0
    page: int = 0
    seconds: float = 0.0
    tp_rank: int | None = None

    def concerns(self, at: str, arguments: tuple[Any, ...]) -> bool:
        """Count a method call with these `arguments`; return whether it is the nth one."""
        if at != self.at:
            return False
        if self.tp_rank is not None and arguments[1].tp_rank != self.tp_rank:
            return False
        self.nth -= 1
        return self.nth == 0

    def strike(self, arguments: tuple[Any, ...]) -> None:
        if self.do == "forget":
            client, namespace, prefix_hashes = arguments[:3]
            client.remove(namespace, [prefix_hashes[self.page]])
        elif self.do == "slow":
            time.sleep(self.seconds)
        else:
            os.kill(self.node_pid, signal.SIGKILL if self.do == "kill" else signal.SIGSTOP)
        if self.do == "kill":
            _wait_dead(self.node_pid)
        elif self.do == "die":
            threading.Timer(DYING_S, os.kill, (self.node_pid, signal.SIGKILL)).start()


_lock = threading.Lock()
_faults: list[Fault] = []
_calls: Counter[str] = Counter()
_struck: list[str] = []


def install() -> None:
    """Wrap the client's methods in this process, once."""
    for at, methods in MOMENTS.items():
        for owner, name in methods:
            method = getattr(owner, name)
            if not hasattr(method, "__wrapped__"):
                setattr(owner, name, _watched(at, method))


def arm(**fault: Any) -> None:
    install()
    with _lock:
        _faults.append(Fault(**fault))


def report() -> dict[str, Any]:
    """Return the calls of each kind since the last report, and the faults that struck.

    Faults that did not strike are disarmed.
    """
    with _lock:
        found = {"calls": dict(_calls), "struck": list(_struck)}
        _calls.clear()
        _struck.clear()
        _faults.clear()
    return found


def _watched(at: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        with _lock:
            _calls[at] += 1
            now = [fault for fault in _faults if fault.concerns(at, arguments)]
            for fault in now:
                _faults.remove(fault)
                _struck.append(f"{fault.do} at {at}")
        for fault in now:
            fault.strike(arguments)
        return method(*arguments, **options)

    return call


def _wait_dead(pid: int) -> None:
    """Wait until the process is gone or a zombie, so that its sockets are closed."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.005)
