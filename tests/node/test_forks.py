"""A process that forks while its threads are in calls: its children are told that the client is not
theirs, may make one of their own, and end; it goes on.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tools.node_process import NodeProcess

FORKING = Path(__file__).parent.parent / "helpers" / "fork_calls.py"
FORKS = int(os.environ.get("FORKS", "20"))


def begin(node: NodeProcess, wire: str, forks: int) -> "subprocess.Popen[str]":
    command = [sys.executable, str(FORKING), node.address, wire, str(forks)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_forks_beside_calls_leave_parent_and_children_well(
    shared_node: NodeProcess, wire: str
) -> None:
    process = begin(shared_node, wire, FORKS)
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert said.splitlines() == ["children 0", "failed"]
    assert process.returncode == 0


def test_a_fork_beside_a_grpc_call_that_hangs_refuses_clients_in_the_child() -> None:
    """gRPC can not be used there: a call would not end.

    The fork does not wait for the call.
    """
    with NodeProcess("--ram-bytes", "64MiB", "--extent-bytes", "16MiB") as node:
        process = begin(node, "grpc", 0)
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(node.pid, signal.SIGSTOP)
            process.stdin.write("\n")
            process.stdin.flush()
            said = process.stdout.readline()
            os.kill(node.pid, signal.SIGCONT)
            rest, _ = process.communicate(timeout=120)
        finally:
            os.kill(node.pid, signal.SIGCONT)
            process.kill()
        assert said + rest == "children 0\nfailed\n"
