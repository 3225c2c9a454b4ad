"""A process that runs out of descriptors or threads gets Unavailable and lives.

gRPC alone would end the process.
"""

import subprocess
import sys
import threading

import pytest

from kvstore import Client, ClientConfig, Namespace, Unavailable, opaque_layout

LEFT = """
import os, resource, sys
from kvstore import Client, ClientConfig, Namespace, Unavailable, opaque_layout
space = Namespace("m", opaque_layout(4096))
config = ClientConfig(address="127.0.0.1:" + sys.argv[1], timeout_s=2.0)
def asked(how):
    try:
        with Client(config) as client:
            client.lookup(space, [b"k" * 32])
    except Unavailable as error:
        assert how in str(error), error
asked("")  # gRPC keeps some descriptors from now on, and closes others at any time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
taken = []
try:
    while True:
        taken.append(os.eventfd(0))
except OSError:
    pass
for _ in range(8):
    asked("descriptors left (ulimit -n)")
    os.close(taken.pop())
print("alive")
"""


def test_process_without_descriptors_survives(unserved_port: int) -> None:
    """Regression: SIGABRT ended it with 0, 1, 2, 3 or 5 descriptors left."""
    child = subprocess.run(
        [sys.executable, "-c", LEFT, str(unserved_port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr


def test_call_without_threads_fails_at_once(
    unserved_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: gRPC tried for 12 s, past the deadline, and ended the process."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Client(ClientConfig(address=f"127.0.0.1:{unserved_port}")) as client:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unavailable, match="fewer than 8 threads"):
            client.lookup(Namespace("m", opaque_layout(4096)), [b"k" * 32])
