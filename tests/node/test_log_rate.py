"""The rate limit of a node's log lines, which clients could otherwise flood."""

import logging
import socket

from kvstore.log_rate import LINES, WINDOW_S, LogRate
from kvstore.tools.node_process import NodeProcess


def test_log_lines_of_a_kind_are_limited_and_counted() -> None:
    now = 100.0
    rate = LogRate(lambda: now)

    def log_line(line: int, *arguments: object) -> str | None:
        record = logging.LogRecord(
            "node", logging.INFO, "file.py", line, "%s said %d", arguments, None
        )
        return record.getMessage() if rate.filter(record) else None

    assert [log_line(1, "a", n) for n in range(LINES + 30)] == [
        f"a said {n}" for n in range(LINES)
    ] + [None] * 30
    assert log_line(2, "b", 1) == "b said 1", "each log statement has its own limit"
    now += WINDOW_S
    assert log_line(1, "a %", 2) == "a % said 2 (and 30 more like this before)"
    assert log_line(1, "a", 3) == "a said 3"


def test_invalid_connections_do_not_flood_the_log() -> None:
    with NodeProcess("--ram-bytes", "1MiB", "--log-level", "INFO") as process:
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", process.bulk_port)) as stranger:
                stranger.sendall(b"no frame at all!")
                stranger.recv(1 << 16)
        lines = process.log_text.splitlines()
    about = [line for line in lines if "127.0.0.1" in line]
    assert 0 < len(about) <= 3 * LINES, about[-1]
