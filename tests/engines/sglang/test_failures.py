"""R7, R11: the node is killed, hangs, restarts or is slow while SGLang saves and loads."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PAGE, dsa, fill, indexer_transfer, mha, options, page_bytes, start_node, stopped

from gpu_agent.engines.sglang import DEFAULTS
from kvstore import Client, ClientConfig

Make = Callable[..., Any]
TOKENS = list(range(40 * PAGE))
SLOTS = torch.arange(len(TOKENS))
TARGET = SLOTS + 1024
LOOKUP_S, LOAD_S, SAVE_S = 0.5, 1.0, 1.0
# Slack for a busy machine; without a deadline none of these calls would ever return.
SLACK_S = 8.0


class Node:
    """A node with a data directory that can be stopped, killed and restarted on its ports."""

    def __init__(self, data_dir: Path) -> None:
        self._flags = (
            "--ram-bytes",
            "64MiB",
            "--extent-bytes",
            "4MiB",
            "--data-dir",
            str(data_dir),
        )
        self.process = start_node(*self._flags)
        self.address = self.process.address

    def restart(self) -> None:
        ports = (
            self.address.rpartition(":")[2],
            str(self.process.bulk_port),
            str(self.process.metrics_port),
        )
        named = [
            part
            for pair in zip(("--port", "--bulk-port", "--metrics-port"), ports, strict=True)
            for part in pair
        ]
        self.process = start_node(*self._flags, *named)

    def hung(self) -> contextlib.AbstractContextManager[None]:
        return stopped(self.process)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "data")
    yield node
    node.process.kill()


@pytest.fixture
def config(own: Node) -> dict[str, Any]:
    return options(
        own.address,
        revision=str(uuid.uuid4()),
        lookup_timeout_s=LOOKUP_S,
        load_timeout_s=LOAD_S,
        save_timeout_s=SAVE_S,
        timeout_per_ki_token_s=0.0,
        backoff_s_max=0.5,
    )


@pytest.fixture(params=["shm", "bulk"])
def pair(request: pytest.FixtureRequest, engine: Make) -> tuple[Any, Any]:
    """Return (engine with stored pages, engine without pages)."""
    made = [engine(mha(slots=4096), wire=request.param) for _ in range(2)]
    for one in made:
        fill(one.host)
    assert made[0].backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    return made[0], made[1]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds + SLACK_S, f"took {took:.2f} s"


def until_hit(engine: Any, tokens: list[int] = TOKENS) -> None:
    """Wait until the engine's client has reconnected and hits."""
    end = time.monotonic() + 60.0
    while engine.query(tokens).storage_hit_count != len(tokens):
        assert time.monotonic() < end, "no hit after the restart"
        time.sleep(0.05)


def test_hung_node_costs_one_deadline_then_opens_the_breaker(
    own: Node, pair: tuple[Any, Any]
) -> None:
    _, reader = pair
    with own.hung():
        with within(LOOKUP_S):
            assert reader.query(TOKENS).storage_hit_count == 0
        start = time.monotonic()
        for _ in range(20):
            assert reader.query(TOKENS).storage_hit_count == 0
            assert reader.backup([7] * PAGE, SLOTS[:PAGE]).completed_tokens == 0
        assert time.monotonic() - start < 20 * (LOOKUP_S + SAVE_S) * 2 / 3, (
            "the breaker did not open"
        )
    until_hit(reader)


def test_node_hung_between_query_and_get_writes_no_page(own: Node, pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    operation = reader.query(TOKENS)
    assert operation.storage_hit_count == len(TOKENS)
    before = page_bytes(reader.host, TARGET)
    with own.hung():
        with within(LOAD_S):
            assert reader.fetch(operation, TARGET)[0] == 0
        assert page_bytes(reader.host, TARGET) == before
    time.sleep(1.0)  # for late answers
    assert page_bytes(reader.host, TARGET) == before
    until_hit(reader)
    assert reader.fetch(reader.query(TOKENS), TARGET)[0] == len(TOKENS)
    assert page_bytes(reader.host, TARGET) == page_bytes(writer.host, SLOTS)


def test_node_hung_during_a_set_stores_nothing(own: Node, pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    tokens = [9, *TOKENS[1:]]
    with own.hung(), within(SAVE_S + LOOKUP_S):
        assert writer.backup(tokens, SLOTS).completed_tokens == 0
    fill(writer.host)  # the engine reuses the slots
    time.sleep(1.0)
    until_hit(reader)
    assert reader.query(tokens).storage_hit_count == 0
    assert writer.backup(tokens, SLOTS).completed_tokens == len(tokens)
    assert reader.fetch(reader.query(tokens), TARGET)[0] == len(tokens)
    assert page_bytes(reader.host, TARGET) == page_bytes(writer.host, SLOTS)


def test_killed_node_is_a_miss_and_hits_after_restart(own: Node, pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    reader.backend._client.flush()
    operation = reader.query(TOKENS)
    before = page_bytes(reader.host, TARGET)
    own.process.kill()
    with within(LOAD_S):
        assert reader.fetch(operation, TARGET)[0] == 0
    with within(LOOKUP_S):
        assert reader.query(TOKENS).storage_hit_count == 0
    with within(SAVE_S + LOOKUP_S):
        assert writer.backup([7] * PAGE, SLOTS[:PAGE]).completed_tokens == 0
    assert page_bytes(reader.host, TARGET) == before
    own.restart()
    until_hit(reader)
    assert reader.fetch(reader.query(TOKENS), TARGET)[0] == len(TOKENS)
    assert page_bytes(reader.host, TARGET) == page_bytes(writer.host, SLOTS)


def test_node_killed_under_load_never_returns_wrong_bytes(own: Node, pair: tuple[Any, Any]) -> None:
    """Sets, queries and gets continue while the node is killed and restarted three times."""
    writer, reader = pair
    expected = page_bytes(writer.host, SLOTS)
    stop, outcomes = threading.Event(), {"stored": 0, "loaded": 0, "missed": 0}
    wrong: list[str] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            tokens = [number, *TOKENS[1:]]
            stored = writer.backup(tokens, SLOTS).completed_tokens
            outcomes["stored"] += stored == len(tokens)
            done, _ = reader.fetch(reader.query(tokens), TARGET)
            outcomes["loaded" if done else "missed"] += 1
            if page_bytes(reader.host, TARGET[:done]) != expected[: done // PAGE]:
                wrong.append(f"{number}: {done} tokens")
            fill(reader.host)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(3):
        time.sleep(0.7)
        own.process.kill()
        time.sleep(0.4)
        own.restart()
    end = time.monotonic() + 60.0
    while outcomes["loaded"] <= 5 and time.monotonic() < end:
        time.sleep(0.05)
    stop.set()
    worker.join(60.0)
    assert not worker.is_alive()
    assert wrong == []
    assert outcomes["loaded"] > 5
    assert outcomes["missed"] > 0


def test_engine_starts_without_a_node_and_connects_later(own: Node, engine: Make) -> None:
    own.process.kill()
    with within(3.0):
        made = engine(mha(slots=4096))
    assert made.backup(TOKENS, SLOTS).completed_tokens == 0
    own.restart()
    end = time.monotonic() + 60.0
    while made.backup(TOKENS, SLOTS).completed_tokens != len(TOKENS):
        assert time.monotonic() < end
        time.sleep(0.05)
    until_hit(made)


def test_flipped_bit_is_a_miss(own: Node, pair: tuple[Any, Any]) -> None:
    """R5: the bit is flipped directly in the node's memory."""
    writer, reader = pair
    keys = [bytes.fromhex(key) for key in writer.hashes(TOKENS)]
    with (
        Client(ClientConfig(address=own.address, wire="shm")) as client,
        client.open_get(writer.backend._pages["kv"].namespace, keys) as slots,
    ):
        slots.arena.memory[slots.offsets[11] + 77] ^= 1
    assert reader.fetch(reader.query(TOKENS), TARGET)[0] == 11 * PAGE
    assert page_bytes(reader.host, TARGET[: 11 * PAGE]) == page_bytes(
        writer.host, SLOTS[: 11 * PAGE]
    )


@pytest.mark.parametrize("hung", [False, True])
def test_detach_takes_less_than_ten_seconds(own: Node, engine: Make, hung: bool) -> None:
    made = engine(*dsa(slots=2048), save_timeout_s=5.0, load_timeout_s=5.0)
    tokens = list(range(10 * 64))
    made.backup(tokens, torch.arange(len(tokens)), [indexer_transfer()])
    with own.hung() if hung else contextlib.nullcontext():
        if hung:
            made.controller.write_storage(
                torch.arange(len(tokens)),
                [7, *tokens[1:]],
                made.hashes([7, *tokens[1:]]),
                extra_pools=None,
            )
            time.sleep(0.2)
        with within(10.0):
            made.controller.detach_storage_backend()
        assert made.controller.storage_backend is None
        made.controller.detach_storage_backend()  # a second detach is harmless


def test_close_may_come_first_and_twice(config: dict[str, Any], engine: Make) -> None:
    backend = engine(mha()).backend
    backend.close()
    backend.close()
    assert backend.batch_exists(["00" * 32]) == 0
    assert backend.batch_set_v1(["00" * 32], SLOTS[:PAGE]) == [False]


# ---- slow node ------------------------------------------------------------------------------


class SlowProxy:
    """Forward TCP streams at most `nbytes_per_s` each way."""

    def __init__(self, address: str, nbytes_per_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._target, self._rate = (host, int(port)), nbytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                time.sleep(len(data) / self._rate)
                target.sendall(data)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            one.close()


def test_slow_node_stays_within_the_engines_wait_budget(engine: Make, own: Node) -> None:
    """The default deadlines are one second, plus 0.25 s per 1024 tokens."""
    quick = engine(mha(slots=4096, heads=8, dim=64))
    fill(quick.host)
    assert quick.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    page_nbytes = quick.backend._pages["kv"].page_nbytes
    # The transfer of all pages takes six seconds.
    proxy = SlowProxy(own.address, len(TOKENS) // PAGE * page_nbytes / 6)
    slow = engine(
        mha(slots=4096, heads=8, dim=64),
        address=proxy.address,
        wire="grpc",
        staging_nbytes=page_nbytes,
        **DEFAULTS,
    )
    fill(slow.host)
    start = time.monotonic()
    operation = slow.query(TOKENS)
    assert operation.storage_hit_count == len(TOKENS)
    done, _ = slow.fetch(operation, TARGET)
    took = time.monotonic() - start
    assert took < 1.0 + 0.25 * len(TOKENS) / 1024 + 3.0, f"took {took:.2f} s"
    assert 0 < done < len(TOKENS), "pages loaded in time are used"
    assert page_bytes(slow.host, TARGET[:done]) == page_bytes(quick.host, SLOTS[:done])
    proxy.close()
