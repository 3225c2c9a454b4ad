"""Deployments of Dynamo, which `make test-dynamo` installs, a node, and bridges between them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from real_dynamo import LOCAL, Bridge, Deployment
from restartable_node import RestartableNode


@pytest.fixture
def dynamo(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path / "dynamo")
    yield deployment
    deployment.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RestartableNode]:
    with RestartableNode(tmp_path / "node") as node:
        yield node


@pytest.fixture
def events() -> str:
    """Return the address of the bridge, the same when it is started again."""
    return f"tcp://{LOCAL}:{free_port()}"


@pytest.fixture
def bridge(store: RestartableNode, events: str) -> Iterator[Bridge]:
    """Return a function that starts `kvstore events` for the model `m`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "kvstore", "events", "-a", store.address, "--model", "m"]
        command += ["--endpoint", "none", "--mooncake", events, *flags]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
