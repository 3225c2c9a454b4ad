"""A process that forks while its threads are in calls, run by tests.

    python fork_calls.py ADDRESS WIRE FORKS

A child uses its parent's client, closes it, makes one of its own, and ends as Python ends. It says
by its exit status what was wrong, 0 if nothing was; the parent prints what they said. With FORKS=0
it waits for a line, forks once while its thread's call hangs, and prints what the child said.
"""

import gc
import os
import signal
import sys
import threading
import time

from kvstore import Client, ClientConfig, InvalidRequest, KVStoreError, Namespace, opaque_layout

CHILD_S = 60.0  # far more than it needs on a starved machine, and no child that hangs reaches it
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
    inherited.pop().close()  # and nobody has it any more
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

    if not forks:
        print("ready", flush=True)
        sys.stdin.readline()
    threads = [threading.Thread(target=call_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    said = []
    for _ in range(max(1, forks)):
        time.sleep(0.01 if forks else 0.5)  # a thread is in a call most of the time
        said.append(forked(inherited, address, wire, may_connect=bool(forks)))
    over.append(True)
    print("children", *sorted(set(said)), flush=True)
    for thread in threads:
        thread.join()
    checked(client)
    client.close()
    print("failed", *failed, flush=True)


main()
