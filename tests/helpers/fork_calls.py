"""A process that forks while its threads are in calls, run by tests.

    python fork_calls.py ADDRESS WIRE FORKS

A child tries its parent's client, closes it, connects a client of its own and exits normally. Its
exit status says what failed, 0 if nothing did; the parent prints the statuses. With FORKS=0, the
process waits for an input line, then forks once while its threads' calls hang.
"""

import gc
import os
import signal
import sys
import threading
import time

import kvstore.transports.grpc_process
from kvstore import Client, ClientConfig, InvalidRequest, KVStoreError, Namespace, opaque_layout

CHILD_S = 60.0  # far more than a child needs even on a starved machine; ends a child that hangs
CALL_S = 20.0
NAMESPACE = Namespace(model="forks", layout=opaque_layout(4096))
KEYS = [bytes([number]) * 32 for number in range(4)]
PAGES = [key * 128 for key in KEYS]


def connect(address: str, wire: str) -> Client:
    return Client(ClientConfig(address, wire=wire, timeout_s=CALL_S, connect_timeout_s=CALL_S))


def checked(client: Client) -> None:
    buffers = [bytearray(4096) for _ in KEYS]
    assert client.get(NAMESPACE, KEYS, buffers) == [True] * len(KEYS)
    assert buffers == PAGES, "wrong bytes"


def child(inherited: list[Client], address: str, wire: str, may_connect: bool) -> int:
    signal.alarm(int(CHILD_S))
    try:
        checked(inherited[0])
        return 1
    except InvalidRequest:
        pass
    inherited.pop().close()  # the last reference
    gc.collect()
    try:
        with connect(address, wire) as own:
            checked(own)
    except InvalidRequest as error:
        return 2 if may_connect or "forked" not in str(error) else 0
    except KVStoreError:
        return 3
    return 0 if may_connect else 4


def forked(inherited: list[Client], address: str, wire: str, may_connect: bool = True) -> int:
    pid = os.fork()
    if not pid:
        sys.exit(child(inherited, address, wire, may_connect))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    address, wire, forks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    inherited = [connect(address, wire)]
    client, over, failed = inherited[0], list[bool](), list[BaseException]()
    client.put(NAMESPACE, KEYS, PAGES)

    def call_on() -> None:
        try:
            while not over:
                checked(client)
        except BaseException as error:
            failed.append(error)
            raise

    if forks:  # a call on a starved machine may take longer than a fork waits for it
        kvstore.transports.grpc_process.FORK_S_MAX = CHILD_S
    else:
        print("ready", flush=True)
        sys.stdin.readline()
    threads = [threading.Thread(target=call_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    statuses = []
    for _ in range(max(1, forks)):
        time.sleep(0.01 if forks else 0.5)  # a thread is in a call most of the time
        statuses.append(forked(inherited, address, wire, may_connect=bool(forks)))
    over.append(True)
    print("children", *sorted(set(statuses)), flush=True)
    for thread in threads:
        thread.join()
    checked(client)
    client.close()
    print("failed", *failed, flush=True)


main()
