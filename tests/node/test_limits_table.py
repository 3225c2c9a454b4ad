"""docs/operations.md, "Limits": every cap has its row, and every row its test."""

import pathlib
import re
import socket
from typing import Any

from gateways import servicer_of

from kvstore.checksum import CHUNK_NBYTES
from kvstore.config import GET_PIECES_MAX, GET_RANGES_MAX
from kvstore.log_rate import LINES, WINDOW_S
from node.config import NodeConfig
from node.console.console import AT_WORK_MAX, EVERY_S
from node.console.pages import BYTES_MAX
from node.gateway import main, options, supervisor
from node.ram.namespace import DESCRIPTIONS_NBYTES_MAX
from node.serve import gateway, http_server, limits, recorder
from node.serve.doors import DESCRIPTORS_LEFT_MIN
from node.server import Node

ROOT = pathlib.Path(__file__).parent.parent.parent


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.split("## Limits\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [cells for cells in lines[2:] if cells]


def test_every_row_of_the_table_names_tests_that_exist() -> None:
    there = {
        name
        for folder in ("node", "disk", "access", "gateway")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(rows()) > 15
    for row in rows():
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert named, f"{row[0]} has no test"
        assert set(named) <= there, f"{row[0]}: {set(named) - there} do not exist"


def test_every_cap_has_its_row(node: Node, monkeypatch: Any) -> None:
    """Caps are made by one function; those of a node that starts are all of them."""
    assert node.shm is not None
    servicer, calls = servicer_of(node), node.grpc.calls
    budgets = [node.service.requests, node.sessions.reserved, node.sessions.held, node.service.followers._budget]
    budgets += node.service._long_calls.values()
    budgets += [calls.calls, calls.transfers, calls.durable, calls.loads]
    places = [node.bulk._places, node.shm._places, node.metrics._places, *servicer.places]
    with socket.socket() as unused:
        door = node.grpc.open_door("one more", unused)
    door._spare.close()
    places += [door._places]
    assert node.console is not None
    budgets += [node.console.watchers, node.console.calls, node.console.reads]
    caps = [one.cap for one in (*budgets, *places)]
    told = {name.strip() for row in rows() for name in row[0].split(",")}
    assert {cap.what for cap in caps} <= told
    assert all(0 < cap.per_peer <= cap.total for cap in caps)
    sources = [path.read_text() for path in (ROOT / "node").rglob("*.py")]
    made = sum(len(re.findall(r"\bcap\(", text)) for text in sources) - 1  # its definition
    assert made == len(caps) - len(limits.LONG_CALLS) + 1, "a cap that this test does not know"


# A part of the row -> what it says, made from the numbers in use.
SAID = {
    "bulk connections": f"`--sessions-max` ({NodeConfig().sessions_max})",
    "gRPC connections": f"{supervisor.CONNECTIONS_MAX:,} of each gateway",
    "connections of a gateway": f"{gateway.CONNECTIONS_MAX:,} to its node",
    "memory of a gateway": (
        f"`--grpc-memory-bytes` ({NodeConfig().grpc_memory_nbytes >> 20} MiB), looked at {1 / main.WATCH_S:g} times"
    ),
    "time of a gateway to say that it lives": f"{supervisor.SILENT_S_MAX:g} s",
    "time for a first request": f"{limits.REQUEST_S_MAX:g} s, all of it",
    "gRPC calls": f"({4 * NodeConfig().grpc_threads}); {options.STREAMS_OF_CONNECTION_MAX} of a connection",
    "gRPC transfers": f"({NodeConfig().grpc_threads * 3 // 4})",
    "gRPC durable puts": f"({NodeConfig().grpc_threads * 3 // 8})",
    "gRPC gets from disk": f"({NodeConfig().grpc_threads * 9 // 16})",
    "health calls": f"{limits.HEALTH_CALLS_MAX}, a watch for an hour",
    "reflection streams": f"{limits.REFLECTION_STREAMS_MAX}, each {limits.REFLECTION_S_MAX:g} s",
    "bytes on a gRPC stream that nobody has read": f"{options.STREAM_NBYTES_MAX >> 20} MiB",
    "gRPC metadata": f"{options.METADATA_NBYTES_MAX >> 10} KiB a call",
    "time for a put or get": (
        f"its bytes at {limits.TRANSFER_NBYTES_PER_S_MIN >> 20} MiB/s and `--stall-s`; {CHUNK_NBYTES >> 10} KiB in each"
    ),
    "bytes of large requests": (
        f"{limits.REQUESTS_NBYTES_MAX >> 20} MiB, {limits.REQUEST_NBYTES_FACTOR} bytes for each byte of requests over "
        f"{limits.REQUEST_NBYTES_FREE >> 10} KiB"
    ),
    "keys, page bytes and ranges of a request": f"{GET_RANGES_MAX:,} ranges, {GET_PIECES_MAX:,} pieces",
    "namespaces": (
        f"{DESCRIPTIONS_NBYTES_MAX >> 20} MiB of descriptions; one description "
        f"{limits.DESCRIPTION_NBYTES_MAX >> 10} KiB"
    ),
    ", ".join(
        f"{op} calls" for op in limits.LONG_CALLS
    ): f"{', '.join(map(str, limits.LONG_CALLS.values()))} at a time",
    "a recording": f"one at a time, a day; {recorder.WAITING_PAGES_MAX:,} pages",
    "one scrub": f"{limits.SCRUB_NBYTES_MAX >> 20} MiB, {limits.SCRUB_S_MAX:g} s",
    "HTTP connections": (
        f"{limits.HTTP_CONNECTIONS_MAX}, and {http_server.BACKLOG} that wait to be accepted; "
        f"{limits.HTTP_REQUEST_S_MAX:g} s for a request of {http_server.HEAD_NBYTES_MAX >> 10} KiB of head and "
        f"{http_server.BODY_NBYTES_MAX >> 10} KiB of body, {limits.HTTP_REPLY_S_MAX:g} s for its reply"
    ),
    "console watchers": f"{limits.WATCHERS_MAX}; told each {EVERY_S:g} s",
    "console calls, console reads": (
        f"{limits.CONSOLE_CALLS_MAX} of each, {AT_WORK_MAX} at a time; {BYTES_MAX >> 20} MiB of a page"
    ),
    "descriptors": f"fewer than {DESCRIPTORS_LEFT_MIN} are left",
    "log lines": f"{LINES} of one statement in {WINDOW_S:g} s",
    "calls that compute: all but those above, puts and gets": "1 of a peer at a time",
}


def test_the_numbers_of_the_table_are_those_in_use() -> None:
    told = {row[0]: " | ".join(row[1:-1]) for row in rows()}
    assert {name: said for name, said in SAID.items() if said not in told[name]} == {}
    assert limits.HEALTH_WATCH_S_MAX == 3600.0
    busy = limits.WATCHERS_MAX + 2 * limits.CONSOLE_CALLS_MAX
    assert busy < limits.HTTP_CONNECTIONS_MAX // 2, "scrapes find a place beside all that the console does"
    assert recorder.RECORD_MS_MAX == 24 * 3600 * 1000
    assert f"for {recorder.ABANDONED_S:g} s ends" in told["a recording"]
