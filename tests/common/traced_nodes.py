"""A node in a process of its own that is told to record spans."""

import os
import sys
from pathlib import Path
from unittest import mock

from kvstore.measure.node_process import NodeProcess

FLAGS = ("--ram-bytes", "16MiB", "--shm-socket", "none")


def traced_node(modules: Path, **environ: str) -> NodeProcess:
    """`modules`: a folder where it finds more of them. This process stays as it is: its own spans go nowhere."""
    environ["PYTHONPATH"] = os.pathsep.join([str(modules), *filter(None, sys.path)])
    with mock.patch.dict(os.environ, environ):
        return NodeProcess(*FLAGS)
