"""A scheduler's lookups give the same answers from threads as from a process of their own."""

import dataclasses
import inspect
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import PATIENT

from gpu_agent.blocks.lookups import LookupBackend, Lookups, ThreadLookups
from gpu_agent.worker import frames, lookup_client, worker_process
from gpu_agent.worker.lookup_client import ProcessLookups
from gpu_agent.worker.process_backend import ProcessBackend
from gpu_agent.worker.worker_process import WorkerTimeouts
from kvstore import Client, ClientConfig, Namespace
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

KEYS = [bytes([i]) * 32 for i in range(4)]
WAIT_S = 60.0


# Start lookup processes without torch, which takes most of their start. test_backends.py starts the
# usual one with torch.
LIGHT = """
import sys
from unittest.mock import MagicMock
sys.modules["torch"] = MagicMock()
from gpu_agent.worker.__main__ import main
main(int(sys.argv[1]))
"""
COMMAND = [sys.executable, "-c", LIGHT]
SOON = WorkerTimeouts(restart_s=0.05)


def namespace(epoch: int = 0) -> Namespace:
    return Namespace(f"askers {secrets.token_hex(8)}", opaque_layout(4096), epoch=epoch)


def until(asker: LookupBackend, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        asker.poll()
        time.sleep(0.002)


def ended(asker: LookupBackend, future: Any) -> Any:
    until(asker, future.done)
    return future.exception() or future.result()


@pytest.fixture
def store(shared_node: NodeProcess) -> Iterator[Client]:
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        yield client


@pytest.fixture(scope="module", params=["threads", "process"])
def asker(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[LookupBackend]:
    config = ClientConfig(address=shared_node.address, **PATIENT)
    asker: Any = (
        ProcessLookups(config, COMMAND)
        if request.param == "process"
        else ThreadLookups(Client(config))
    )
    if request.param == "process":
        until(asker, lambda: asker._child.ready)
    yield asker
    asker.close()


def test_block_hits_only_if_every_shard_has_it(asker: LookupBackend, store: Client) -> None:
    one, two, page = namespace(), namespace(), bytes(4096)
    assert ended(asker, asker.open([one, two], 5.0)) is None
    store.put(one, KEYS[:3], [page] * 3)
    store.put(two, KEYS[1:], [page] * 3)
    answer = ended(asker, asker.look_up([([one, two], KEYS), ([one], KEYS[:2]), ([two], [])], 5.0))
    assert answer == (b"\0\1\1\0", b"\1\1", b"")
    assert ended(asker, asker.touch([([one, two], KEYS)], 5.0)) is None


def test_namespace_not_opened_before_is_looked_up(asker: LookupBackend, store: Client) -> None:
    late = namespace(epoch=7)
    store.put(late, KEYS[:1], [bytes(4096)])
    assert ended(asker, asker.look_up([([late], KEYS)], 5.0)) == (b"\1\0\0\0",)


def test_invalid_lookups_raise_invalid_request(asker: LookupBackend) -> None:
    for wrong in ([b"abc"], [b"k" * 300]):
        assert isinstance(
            ended(asker, asker.look_up([([namespace()], wrong)], 5.0)), InvalidRequest
        )


def test_concurrent_lookups_get_their_own_answers(asker: LookupBackend, store: Client) -> None:
    names = [namespace() for _ in range(20)]
    for number, name in enumerate(names):
        store.put(name, KEYS[: number % 5], [bytes(4096)] * (number % 5)) if number % 5 else None
    asked = [asker.look_up([([name], KEYS)], 10.0) for name in names]
    found = [ended(asker, future)[0] for future in asked]
    assert found == [bytes(i < number % 5 for i in range(4)) for number in range(20)]


def test_default_command_starts_the_agents_process() -> None:
    usual = [
        inspect.signature(kind).parameters["command"].default
        for kind in (ProcessLookups, ProcessBackend)
    ]
    assert usual == [()] * 2
    assert worker_process._command()[-2:] == ["-m", "gpu_agent.worker"]


def test_process_restarts_after_many_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: an engine whose weights change every minute failed to restart the process.

    The setup grew too large, and the error was raised into the engine's scheduler.
    """
    monkeypatch.setattr(frames, "BODY_NBYTES_MAX", 1 << 20)
    asker = ProcessLookups(ClientConfig(address="127.0.0.1:1"), COMMAND, SOON)
    until(asker, lambda: asker._child.ready)
    for epoch in range(1000):
        asker.open([dataclasses.replace(namespace(epoch), salt="s" * 1000)], 5.0)
    pid = asker._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(asker, lambda: asker._child.ready and asker._child.pid != pid)
    asker.close()


def test_replacement_process_knows_earlier_namespaces(
    shared_node: NodeProcess, store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_client, "NAMED", 2)
    names = [namespace(epoch) for epoch in range(5)]
    for count, name in enumerate(names[1:], 1):
        store.put(name, KEYS[:count], [bytes(4096)] * count)
    asker = ProcessLookups(ClientConfig(address=shared_node.address, **PATIENT), COMMAND, SOON)
    asker.open(names, 5.0)
    until(asker, lambda: asker._child.ready)
    pid = asker._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(asker, lambda: asker._child.ready and asker._child.pid != pid)
    answer = ended(asker, asker.look_up([([name], KEYS) for name in reversed(names)], 20.0))
    assert [sum(there) for there in answer] == [4, 3, 2, 1, 0]
    asker.close()


def test_dead_lookup_process_is_a_miss_and_is_replaced(
    shared_node: NodeProcess, store: Client
) -> None:
    name = namespace()
    store.put(name, KEYS[:2], [bytes(4096)] * 2)
    asker = ProcessLookups(ClientConfig(address=shared_node.address, **PATIENT), COMMAND, SOON)
    lookups = Lookups(asker, 5.0)
    lookups.open([name])
    lookups.ask("early", [([name], KEYS)])  # the process is still starting
    assert lookups.answer("early") == (bytes(4),)
    until(asker, lambda: asker._child.ready)
    pid = asker._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = asker.look_up([([name], KEYS)], 30.0)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(ended(asker, waiting), Unavailable)
    until(asker, lambda: asker._child.ready)

    def found() -> bool:  # may miss: until the first answer, requests wait only OUTAGE_WAIT_S
        lookups.ask("late", [([name], KEYS)])
        until(asker, lambda: lookups.answer("late") is not None)
        return lookups.answer("late") == (b"\1\1\0\0",)

    until(asker, found)
    assert lookups.check() == []
    lookups.close()
    assert asker._child.pid is None


def test_process_that_keeps_dying_is_a_miss() -> None:
    """Regression: after 1,024 deaths in a row, which take a day, the restart pause overflowed.

    The error was raised in each step of the engine.
    """
    no_pause = WorkerTimeouts(restart_s_max=0.0)
    asker = ProcessLookups(ClientConfig(address="127.0.0.1:1"), ["/bin/false"], no_pause)
    asker._child._deaths = 1023
    until(asker, lambda: asker._child._deaths > 1026)
    asker.close()


def test_process_with_too_many_namespaces_is_replaced(
    shared_node: NodeProcess, store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after thousands of weight updates, all lookups failed until a restart."""
    monkeypatch.setattr(lookup_client, "NAMESPACES_MAX", 4)
    monkeypatch.setattr(lookup_client, "NAMED", 2)
    names = [namespace(epoch) for epoch in range(6)]
    store.put(names[-1], KEYS[:2], [bytes(4096)] * 2)
    asker = ProcessLookups(ClientConfig(address=shared_node.address, **PATIENT), COMMAND, SOON)
    until(asker, lambda: asker._child.ready)
    pid = asker._child.pid
    answers = []
    for name in names:  # an epoch ends when the next one begins

        def answered(name: Namespace = name) -> bool:
            answers.append(ended(asker, asker.look_up([([name], KEYS)], 20.0)))
            return not isinstance(answers[-1], Exception)

        until(asker, answered)
    assert answers[-1] == (b"\1\1\0\0",)
    assert asker._child.pid != pid
    asker.close()
