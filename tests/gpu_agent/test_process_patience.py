"""The process beside the engine is asked only when it owes something, and many things are said to
it at once.
"""

import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from block_store import BLOCK

from gpu_agent.blocks.backends import GroupPool
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.options import AgentConfig
from gpu_agent.worker import frames, lookup_client
from gpu_agent.worker.frames import Answer, EngineEnd, Kind
from gpu_agent.worker.lookup_client import ProcessLookups
from gpu_agent.worker.process_backend import ProcessBackend
from gpu_agent.worker.worker_process import WorkerProcess, WorkerTimeouts
from kvstore import Namespace
from kvstore.config import ClientConfig
from kvstore.layout import opaque_layout

NAMESPACE = Namespace("patience", opaque_layout(4096))


Played = tuple[ProcessLookups, socket.socket]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """A process that asks, played by the test: the other end of its socket."""
    ours, theirs = socket.socketpair()

    def start(self: WorkerProcess) -> None:
        self._channel, self.ready, self._process = EngineEnd(ours), True, object()  # type: ignore[assignment]

    monkeypatch.setattr(WorkerProcess, "start", start)
    with ours, theirs:
        yield ProcessLookups(ClientConfig()), theirs


def heard(sock: socket.socket) -> list[tuple[Kind, bytes]]:
    """Frames that were sent."""
    sock.setblocking(False)
    try:
        data = sock.recv(1 << 20)
    except BlockingIOError:
        return []
    found = []
    while data:
        nbytes, kind = frames.header(data)
        found.append((kind, data[frames.HEADER.size : frames.HEADER.size + nbytes]))
        data = data[frames.HEADER.size + nbytes :]
    return found


def touched(sock: socket.socket) -> list[frames.Question]:
    """What was told of requests that have ended."""
    return [frames.parse_question(body) for kind, body in heard(sock) if kind is Kind.TOUCH]


def answer(sock: socket.socket, touches: Sequence[frames.Question]) -> None:
    """They were counted as used."""
    for touch in touches:
        sock.send(frames.answer_frame(Answer(touch.number, 0, None, ())))


def keys(count: int) -> Sequence[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def test_of_many_questions_at_once_the_first_goes_and_the_others_go_together(
    played: Played,
) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    heard(sock)
    asked = [keys(3) for _ in range(5)]
    futures = [asker.look_up([([NAMESPACE], some)], 5.0) for some in asked]
    first = heard(sock)
    asker.poll()
    rest = heard(sock)
    assert [len(first), len(rest)] == [1, 4]
    questions = [frames.parse_question(body) for _, body in first + rest]
    assert [list(question.groups[0][1]) for question in questions] == asked
    for question in questions:
        sock.send(frames.answer_frame(Answer(question.number, 0, None, [b"\1\0\1"])))
    asker.poll()
    assert [future.result() for future in futures] == [(b"\1\0\1",)] * 5
    asker.look_up([([NAMESPACE], keys(1))], 5.0)
    assert len(heard(sock)) == 1  # alone again


def test_answers_of_a_dead_process_are_not_awaited(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    asked = asker.look_up([([NAMESPACE], keys(1))], 5.0)
    asker.on_exit()
    assert isinstance(asked.exception(), lookup_client.Unavailable)
    patience: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            WorkerProcess, "poll", lambda self, patience_s=0.0: patience.append(patience_s)
        )
        asker.poll()
    assert patience == [WorkerTimeouts().idle_s]
    heard(sock)
    asker.look_up([([NAMESPACE], keys(1))], 5.0)
    assert len(heard(sock)) == 1  # alone: at once


def test_a_process_that_owes_nothing_is_not_asked_what_it_said(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    listens = 0
    received = EngineEnd.received

    def counted(self: EngineEnd) -> Any:
        nonlocal listens
        listens += 1
        return received(self)

    monkeypatch.setattr(EngineEnd, "received", counted)
    asker.poll()
    for _ in range(50):
        asker.poll()
    assert listens <= 2
    # Goes with the next poll, and nobody waits for its answer
    done = asker.touch([([NAMESPACE], keys(1))], 5.0)
    listens = 0
    for _ in range(50):
        asker.poll()
    assert listens <= 2
    _, (_, body) = heard(sock)
    sock.send(frames.answer_frame(Answer(frames.parse_question(body).number, 0, None, ())))
    asker._child.timeouts = WorkerTimeouts(idle_s=0.0)
    asker.poll()
    assert done.result() is None
    done = asker.look_up([([NAMESPACE], keys(1))], 5.0)
    listens = 0
    asker._child.timeouts = WorkerTimeouts(idle_s=60.0)
    for _ in range(5):
        asker.poll()
    assert listens == 5


@pytest.mark.parametrize("there", [b"\2", b"\1\0x", b"x\1\0"])
def test_an_answer_that_says_neither_yes_nor_no_ends_the_process(
    played: Played, there: bytes
) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    heard(sock)
    asker.look_up([([NAMESPACE], keys(len(there)))], 5.0)
    ((_, body),) = heard(sock)
    body = frames.answer_frame(Answer(frames.parse_question(body).number, 0, None, [there]))[
        frames.HEADER.size :
    ]
    with pytest.raises(lookup_client.ProtocolError, match="an invalid byte for a key"):
        asker.on_message(Kind.ANSWER, body)


def test_requests_that_end_in_one_step_are_told_of_together(played: Played) -> None:
    asker, sock = played
    lookups = Lookups(asker, 5.0)
    lookups.open([NAMESPACE])
    heard(sock)
    used = [keys(2) for _ in range(20)]
    for number, some in enumerate(used):
        lookups.touch(f"r{number}", [([NAMESPACE], some)])
    assert heard(sock) == []
    lookups.poll()
    told = heard(sock)
    assert [kind for kind, _ in told] == [Kind.TOUCH] * 2
    questions = [frames.parse_question(body) for _, body in told]
    assert [list(group[1]) for question in questions for group in question.groups] == used
    answer(sock, questions)
    lookups.poll()
    assert heard(sock) == []


def test_combined_messages_fit_a_frame(played: Played) -> None:
    """Sixteen requests of a million tokens each."""
    asker, sock = played
    lookups = Lookups(asker, 5.0)
    lookups.open([NAMESPACE])
    heard(sock)
    some = keys(1) * (1 << 16)
    for number in range(16):
        lookups.touch(f"r{number}", [([NAMESPACE], some)])
    told: list[int] = []
    asker._child.give = lambda frame: told.append(len(frame))
    lookups.poll()
    assert lookups.take_counts().lookups_failed == 0
    assert len(told) == 16


def test_of_very_many_requests_that_end_in_one_step_some_are_not_told_of(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 80)
    asker, sock = played
    lookups = Lookups(asker, 5.0)
    for step in range(2):
        for number in range(50):
            lookups.touch(f"r{step}-{number}", [([NAMESPACE], keys(1))])
        lookups.poll()
    told = touched(sock)
    assert [len(question.groups) for question in told] == [16, 16, 8] * 2


def test_touches_under_way_have_a_limit_and_make_room_when_they_end(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 8)
    asker, sock = played
    asker._child.timeouts = WorkerTimeouts(idle_s=0.0)
    lookups = Lookups(asker, 5.0)
    for _ in range(2):
        for number in range(6):
            lookups.touch(f"r{number}", [([NAMESPACE], keys(1))])
            lookups.poll()
        told = touched(sock)
        assert len(told) == 4
        answer(sock, told)
        lookups.poll()


def test_an_engine_that_loads_listens_in_every_step(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []
    monkeypatch.setattr(
        WorkerProcess, "poll", lambda self, patience_s=0.0: patience.append(patience_s)
    )
    layers = {"layers.0": torch.zeros((8, 2, BLOCK, 8), dtype=torch.uint8)}
    pool = table_pool(layers, 8, BLOCK)
    home = ProcessBackend(
        [GroupPool(Namespace("quiet", pool.layout), pool)], ClientConfig(), AgentConfig()
    )
    (agent,) = home.agents(None)
    assert agent is not None
    home.poll()
    agent.save(keys(2), [1, 2])
    home.poll()
    agent.load(keys(2), [3, 4])
    home.poll()
    assert patience == [WorkerTimeouts().idle_s, WorkerTimeouts().saving_s, 0.0]
