"""A node that engine tests kill, stop and restart."""

import os
import signal
import sys
import time
from pathlib import Path

from ports import free_port
from stopping import stop

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

FREE_S = 60.0
Page = tuple[bytes, bytes]  # namespace digest, prefix hash


class RestartableNode:
    """A node with a disk tier on a fixed address, which keeps its pages when restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._node: NodeProcess | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._node is not None
        return self._node.pid

    @property
    def running(self) -> bool:
        return self._node is not None and self._node.running

    @property
    def stopped(self) -> bool:
        """Return whether the node is stopped (SIGSTOP)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def start(self) -> None:
        """Kill the running node, if any, and start one on the same directory and address."""
        self.end()
        flags = (
            "--port",
            str(self.port),
            "--data-dir",
            str(self._directory),
            "--log-level",
            "WARNING",
        )
        sizes = ("--ram-bytes", "256MiB", "--extent-bytes", "16MiB", "--disk-bytes", "1GiB")
        python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
        self._node = NodeProcess(*flags, *sizes, python=python)

    def stop(self) -> None:
        """Stop the node with SIGSTOP, as if its machine hung."""
        stop(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._node is not None:
            self._node.kill()
            self._node = None

    def flush(self) -> None:
        with self.client() as client:
            client.flush()

    def wait_nothing_open(self) -> None:
        """Wait until no page is read or written, so that dead clients' pages are released."""
        end = time.monotonic() + FREE_S
        with self.client() as client:
            while (ram := client.node_status().ram).held_count + ram.writing_count:
                assert time.monotonic() < end, (
                    f"{ram.held_count} pages are held and {ram.writing_count} reserved"
                )
                time.sleep(0.05)

    def client(self) -> Client:
        return Client(ClientConfig(address=self.address))

    def pages(self) -> dict[Page, bytes]:
        """Return the bytes of every stored page."""
        found: dict[tuple[bytes, bytes], bytes] = {}
        with self.client() as client:
            for namespace, _ in client.namespaces():
                hashes = [page.prefix_hash for page in client.list_pages(namespace)]
                buffers = [bytearray(namespace.layout.page_nbytes) for _ in hashes]
                hits = client.get(namespace, hashes, buffers) if hashes else []
                assert all(hits)
                found |= {
                    (namespace.digest, name): bytes(page)
                    for name, page in zip(hashes, buffers, strict=True)
                }
        return found

    def __enter__(self) -> "RestartableNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
