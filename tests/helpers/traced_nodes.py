"""A node in its own process that records spans, and a client that makes traced calls."""

import os
import sys
from pathlib import Path
from unittest import mock

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import request

PAGES = Namespace("llama", opaque_layout(4096))
KEYS = [bytes([i]) * 32 for i in range(1, 9)]
FLAGS = ("--ram-bytes", "16MiB", "--shm-socket", "none")


def traced_node(modules: Path, **environ: str) -> NodeProcess:
    """Start a node that finds more modules in the folder `modules`.

    This process is not changed: its own spans are not exported.
    """
    environ["PYTHONPATH"] = os.pathsep.join([str(modules), *filter(None, sys.path)])
    with mock.patch.dict(os.environ, environ):
        return NodeProcess(*FLAGS)


def ask(node: NodeProcess, times: int) -> None:
    with Client(
        ClientConfig(node.address, wire="bulk", timeout_s=30.0, connect_timeout_s=20.0)
    ) as client:
        for _ in range(times):
            with request("cmpl-7"):
                assert client.lookup(PAGES, KEYS).prefix_pages == 0
