"""The metrics of a vLLM engine over HTTP, with the names of our adapter and growing counts.

vLLM itself needs its own environment (`make test-vllm`); a Prometheus only sees its text.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PER_S = {"hit_tokens": 30_000.0, "queried_tokens": 40_000.0, "prefill_seconds_saved": 3.0}


class _Handler(BaseHTTPRequestHandler):
    started = time.monotonic()

    def do_GET(self) -> None:
        seconds = time.monotonic() - self.started
        lines = [
            f'vllm:kvstore_{name}_total{{model_name="llama", engine="0"}} {rate * seconds}\n'
            for name, rate in PER_S.items()
        ]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Serve the metrics, and yield HOST:PORT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
