"""Forks of a process whose threads are in calls.

A child cannot use the client and learns why, may make its own, and ends; the parent goes on.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tools.node_process import NodeProcess

FORKING = Path(__file__).parent.parent / "helpers" / "fork_calls.py"
FORKS = int(os.environ.get("FORKS", "3"))


def begin(node: NodeProcess, wire: str, forks: int) -> "subprocess.Popen[str]":
    command = [sys.executable, str(FORKING), node.address, wire, str(forks)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("wire", ["grpc", "bulk", pytest.param("shm", marks=pytest.mark.long)])
def test_forks_beside_calls_leave_parent_and_children_well(
    shared_node: NodeProcess, wire: str
) -> None:
    process = begin(shared_node, wire, FORKS)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert output.splitlines() == ["children 0", "failed"]
    assert process.returncode == 0


def test_child_forked_during_a_hanging_grpc_call_refuses_clients() -> None:
    """The fork does not wait for the call, and gRPC cannot be used in the child: calls would
    hang.
    """
    with NodeProcess("--ram-bytes", "16MiB", "--extent-bytes", "1MiB") as node:
        process = begin(node, "grpc", 0)
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(node.pid, signal.SIGSTOP)
            process.stdin.write("\n")
            process.stdin.flush()
            output = process.stdout.readline()
            os.kill(node.pid, signal.SIGCONT)
            rest, _ = process.communicate(timeout=120)
        finally:
            os.kill(node.pid, signal.SIGCONT)
            process.kill()
        assert output + rest == "children 0\nfailed\n"
