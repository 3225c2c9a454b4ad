"""vLLM's server in an environment with our wheel, started by one line: no module path, no address.

A server without a store it can use says so in one line, and serves.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from built_wheel import installed
from engine_answers import prompt
from engine_handle import EngineHandle
from local_host import local_pid
from ports import free_port
from vllm_server import Server

from kvstore.config import local_file
from kvstore.security.identities import add, new_token, token_line
from kvstore.tools.node_process import NodeProcess

P = prompt(1, 100)
SAVED = "vllm:kvstore_pages_saved_total"
LINE = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    builder = os.path.abspath(os.environ.get("KVSTORE_NODE_PYTHON", sys.executable))
    return str(installed(tmp_path_factory.mktemp("wheel"), builder))


def start_node(*flags: str) -> NodeProcess:
    return NodeProcess(
        *("--ram-bytes", "64MiB", *flags),
        python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable),
    )


def lines(server: Server) -> list[str]:
    """Return what the server said about the store, apart from its start."""
    return [line for line in server.said().splitlines() if "kvstore" in line or "store " in line]


def saved_first(server: Server) -> float:
    """Send other prompts until the pages of one were saved, and return their number.

    The node starts beside the server, and what comes before it is ready is not saved.
    """
    for number in range(2, 30):
        server.complete(prompt(number, 100))
        if server.wait_metric(SAVED, 3, timeout_s=3.0) >= 3:
            return server.metrics()[SAVED]
    raise AssertionError(f"nothing was saved: {lines(server)}")


def test_one_line_starts_a_node_and_the_next_server_hits(
    plain: Callable[..., EngineHandle],
    models: Callable[..., str],
    python: str,
    host: dict[str, str],
) -> None:
    expected = plain().alone(P)[0]["tokens"]
    for cached in (0, 96):
        with Server(models("llama"), LINE, python, host) as server:
            server.wait_up()
            before = 0.0 if cached else saved_first(server)
            answer = server.complete(P)
            assert (answer.tokens, answer.cached_tokens) == (expected, cached), lines(server)
            if not cached:
                assert server.wait_metric(SAVED, before + 3) == before + 3, lines(server)
            command = Path(f"/proc/{local_pid()}/cmdline").read_bytes()
            assert command.startswith(python.encode()), "the node is not the wheel's"
            assert any(
                f"store at local (KVSTORE_ADDRESS, unix:{local_file('sock')})" in line
                for line in lines(server)
            )


READER = new_token("default")
REFUSED = "the store refuses this engine, which recomputes until it is served: "
# The token of a server, and the line of its scheduler and of its worker
CASES = {
    "no node": ("", "the store failed, the engine recomputes until it is back: "),
    "unknown token": (new_token("default"), REFUSED),
    "token that may not write": (READER, f"{REFUSED}reader has the role read; put needs write"),
}


@pytest.mark.parametrize("case", CASES)
def test_server_without_a_store_says_so_in_one_line_of_a_process_and_serves(
    plain: Callable[..., EngineHandle],
    models: Callable[..., str],
    python: str,
    host: dict[str, str],
    tmp_path: Path,
    case: str,
) -> None:
    token, warning = CASES[case]
    add(tmp_path / "identities", token_line("reader", READER, tenant="default", role="read"))
    with contextlib.ExitStack() as running:
        host["KVSTORE_ADDRESS"] = f"127.0.0.1:{free_port()}"
        if token:
            host["KVSTORE_TOKEN"] = token
            node = running.enter_context(start_node("--identities", str(tmp_path / "identities")))
            host["KVSTORE_ADDRESS"] = node.address
        server = running.enter_context(Server(models("llama"), LINE, python, host))
        server.wait_up()
        for _ in range(2):
            assert server.complete(P).tokens == plain().alone(P)[0]["tokens"]
            server.forget()
        found = [line for line in lines(server) if "the store" in line]
        assert 1 <= len(found) <= 2, found
        assert all(line.startswith(warning) for line in found), found
