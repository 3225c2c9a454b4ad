"""Run a node in a child process, for `kvstore replay`, benchmarks, demos and tests."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from kvstore import programs
from kvstore.errors import ConfigError, Unavailable

_READY = re.compile(r"kvstore-node ready grpc=(\S+) bulk=(\d+) metrics=(\d+)")


class NodeProcess:
    """Start `kvstore-node` on free ports of the loopback interface, and stop it at the end.

    `flags`: command-line flags of kvstore-node. `python`: an interpreter that has the node package,
    by default this one. `inside`: a command that runs another, such as `ip netns exec NAME`. Raises
    ConfigError if the node package is not installed, and Unavailable, with the node's output, if it
    does not start.
    """

    def __init__(
        self, *flags: str, python: str = sys.executable, inside: Sequence[str] = ()
    ) -> None:
        if python == sys.executable and not programs.installed():
            raise ConfigError("the node is not installed here; pip install 'kvstore-llm[node]'")
        ports = ("--host", "127.0.0.1", "--port", "0", "--bulk-port", "0", "--metrics-port", "0")
        command = [*inside, *programs.command("node.__main__", *ports, *flags, begin=(python,))]
        # Not a pipe: it is not read while the node runs, and a full pipe would stop the node.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `_close`
        self._last_words = ""
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        try:
            ready = _READY.search(_pipe(self._process.stdout).readline())
        except BaseException:  # an interrupt: nobody else knows the process
            self.kill()
            raise
        if ready is None:
            self._process.wait(timeout=10)
            self._close()
            raise Unavailable(f"kvstore-node did not start: {self.log_text.strip()}")
        self.address, self.bulk_port, self.metrics_port = ready[1], int(ready[2]), int(ready[3])

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def log_text(self) -> str:
        """Return its log, also after its end."""
        if self._said.closed:
            return self._last_words
        size = os.fstat(self._said.fileno()).st_size
        # pread, because the file's position belongs to the node
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace")

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = 20.0) -> int:
        """Send SIGTERM, wait for the drain and return the exit status."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> int:
        """Send SIGKILL and return the exit status."""
        return self._end(signal.SIGKILL, 10.0)

    def pause(self) -> None:
        """Send SIGSTOP: the process lives but does not answer until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals, timeout_s: float) -> int:
        if self._process.poll() is None:
            self._process.send_signal(how)
            # A process that was stopped from outside would not see SIGTERM
            self._process.send_signal(signal.SIGCONT)
        try:
            return self._process.wait(timeout_s)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._close()

    def _close(self) -> None:
        self._last_words = self.log_text
        _pipe(self._process.stdout).close()
        self._said.close()

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
