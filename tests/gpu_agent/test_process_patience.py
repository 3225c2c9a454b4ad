"""The process beside the engine is polled only when an answer is due, and messages are combined."""

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from block_store import BLOCK

from gpu_agent.blocks.backends import ShardPool
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.hint_sender import HintedPages
from gpu_agent.hints import RequestHints, Retention
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


FakeProcess = tuple[ProcessLookups, socket.socket]


@pytest.fixture
def fake_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcess]:
    """Replace the lookup process, and return its client and the process's end of the socket."""
    ours, theirs = socket.socketpair()

    def start(self: WorkerProcess) -> None:
        self._channel, self.ready, self._process = EngineEnd(ours), True, object()  # type: ignore[assignment]

    monkeypatch.setattr(WorkerProcess, "start", start)
    with ours, theirs:
        yield ProcessLookups(ClientConfig()), theirs


def sent_frames(sock: socket.socket) -> list[tuple[Kind, bytes]]:
    """Return the frames sent to the process since the last call."""
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


def sent_touches(sock: socket.socket) -> list[frames.Question]:
    """Return the touches of ended requests that were sent."""
    return [frames.parse_question(body) for kind, body in sent_frames(sock) if kind is Kind.TOUCH]


def answer(sock: socket.socket, touches: Sequence[frames.Question]) -> None:
    """Answer the touches as the process does."""
    for touch in touches:
        sock.send(frames.answer_frame(Answer(touch.number, 0, None, ())))


def keys(count: int) -> Sequence[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def test_first_of_many_lookups_is_sent_at_once_and_the_others_together(
    fake_process: FakeProcess,
) -> None:
    asker, sock = fake_process
    asker.open([NAMESPACE], 5.0)
    sent_frames(sock)
    chains = [keys(3) for _ in range(5)]
    futures = [asker.look_up([([NAMESPACE], some)], 5.0) for some in chains]
    first = sent_frames(sock)
    asker.poll()
    rest = sent_frames(sock)
    assert [len(first), len(rest)] == [1, 4]
    questions = [frames.parse_question(body) for _, body in first + rest]
    assert [list(question.groups[0][1]) for question in questions] == chains
    for question in questions:
        sock.send(frames.answer_frame(Answer(question.number, 0, None, [b"\1\0\1"])))
    asker.poll()
    assert [future.result() for future in futures] == [(b"\1\0\1",)] * 5
    asker.look_up([([NAMESPACE], keys(1))], 5.0)
    assert len(sent_frames(sock)) == 1  # sent at once again


def test_answers_of_a_dead_process_are_not_awaited(
    fake_process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, sock = fake_process
    asker.open([NAMESPACE], 5.0)
    future = asker.look_up([([NAMESPACE], keys(1))], 5.0)
    asker.on_exit()
    assert isinstance(future.exception(), lookup_client.Unavailable)
    patience: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            WorkerProcess, "poll", lambda self, patience_s=0.0: patience.append(patience_s)
        )
        asker.poll()
    assert patience == [WorkerTimeouts().idle_s]
    sent_frames(sock)
    asker.look_up([([NAMESPACE], keys(1))], 5.0)
    assert len(sent_frames(sock)) == 1  # sent at once


def test_process_without_due_answers_is_not_polled(
    fake_process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, sock = fake_process
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
    # The touch is sent with the next poll, and its answer is not awaited.
    done = asker.touch([([NAMESPACE], keys(1))], 5.0)
    listens = 0
    for _ in range(50):
        asker.poll()
    assert listens <= 2
    _, (_, body) = sent_frames(sock)
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


@pytest.mark.parametrize("there", [b"\4", b"\3\0x", b"x\1\0"])
def test_invalid_answer_raises_a_protocol_error(fake_process: FakeProcess, there: bytes) -> None:
    asker, sock = fake_process
    asker.open([NAMESPACE], 5.0)
    sent_frames(sock)
    asker.look_up([([NAMESPACE], keys(len(there)))], 5.0)
    ((_, body),) = sent_frames(sock)
    body = frames.answer_frame(Answer(frames.parse_question(body).number, 0, None, [there]))[
        frames.HEADER.size :
    ]
    with pytest.raises(lookup_client.ProtocolError, match="an invalid byte for a key"):
        asker.on_message(Kind.ANSWER, body)


def test_touches_of_one_step_are_sent_together(fake_process: FakeProcess) -> None:
    asker, sock = fake_process
    lookups = Lookups(asker, 5.0)
    lookups.open([NAMESPACE])
    sent_frames(sock)
    used = [keys(2) for _ in range(20)]
    for number, some in enumerate(used):
        lookups.touch(f"r{number}", [([NAMESPACE], some)])
    assert sent_frames(sock) == []
    lookups.poll()
    sent = sent_frames(sock)
    assert [kind for kind, _ in sent] == [Kind.TOUCH] * 2
    questions = [frames.parse_question(body) for _, body in sent]
    assert [list(group[1]) for question in questions for group in question.groups] == used
    answer(sock, questions)
    lookups.poll()
    assert sent_frames(sock) == []


def hinted(count: int, **words: Any) -> HintedPages:
    """Return what a request says about so many pages."""
    said = RequestHints("session", **words)
    return HintedPages(said, [([NAMESPACE], keys(count))], [range(count)], 0.0)


def test_words_of_a_request_are_one_message(fake_process: FakeProcess) -> None:
    """Regression: each of a hundred ranges took its pages' keys with it, half a second long."""
    asker, sock = fake_process
    asker.open([NAMESPACE], 5.0)
    sent_frames(sock)
    ranges = tuple(Retention(at, 5.0, 0, 1000 - at) for at in range(100))
    asker.hint(hinted(1000, retentions=ranges), (0.25, 2.0))
    ((kind, body),) = sent_frames(sock)
    assert kind is Kind.HINT
    assert len(body) < 45_000
    assert frames.parse_hint(body).hints.retentions == ranges


def test_hints_leave_room_for_lookups(fake_process: FakeProcess) -> None:
    """Regression: a stopped process whose buffer is full of hints got no lookup, and stayed."""
    asker, _ = fake_process
    asker.open([NAMESPACE], 5.0)
    some = hinted(1 << 16)  # 2 MiB
    for _ in range(20):
        asker.hint(some, (0.0,))
    assert not asker.look_up([([NAMESPACE], keys(1 << 16))], 5.0).done()
    assert asker.overdue(time.monotonic() + 60.0)


def test_combined_messages_fit_a_frame(fake_process: FakeProcess) -> None:
    """Sixteen requests have a million tokens each."""
    asker, sock = fake_process
    lookups = Lookups(asker, 5.0)
    lookups.open([NAMESPACE])
    sent_frames(sock)
    some = keys(1) * (1 << 16)
    for number in range(16):
        lookups.touch(f"r{number}", [([NAMESPACE], some)])
    sent: list[int] = []
    asker._child.give = lambda frame: sent.append(len(frame))
    lookups.poll()
    assert lookups.take_counts().lookups_failed == 0
    assert len(sent) == 16


def test_touches_of_one_step_have_a_limit(
    fake_process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 80)
    asker, sock = fake_process
    lookups = Lookups(asker, 5.0)
    for step in range(2):
        for number in range(50):
            lookups.touch(f"r{step}-{number}", [([NAMESPACE], keys(1))])
        lookups.poll()
    sent = sent_touches(sock)
    assert [len(question.groups) for question in sent] == [16, 16, 8] * 2


def test_pending_touches_have_a_limit_until_answered(
    fake_process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 8)
    asker, sock = fake_process
    asker._child.timeouts = WorkerTimeouts(idle_s=0.0)
    lookups = Lookups(asker, 5.0)
    for _ in range(2):
        for number in range(6):
            lookups.touch(f"r{number}", [([NAMESPACE], keys(1))])
            lookups.poll()
        sent = sent_touches(sock)
        assert len(sent) == 4
        answer(sock, sent)
        lookups.poll()


def test_engine_with_pending_loads_polls_in_every_step(
    fake_process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []
    monkeypatch.setattr(
        WorkerProcess, "poll", lambda self, patience_s=0.0: patience.append(patience_s)
    )
    layers = {"layers.0": torch.zeros((8, 2, BLOCK, 8), dtype=torch.uint8)}
    pool = table_pool(layers, 8, BLOCK)
    home = ProcessBackend(
        [ShardPool(Namespace("quiet", pool.layout), pool)], ClientConfig(), AgentConfig()
    )
    (agent,) = home.agents(None)
    assert agent is not None
    home.poll()
    agent.save(keys(2), [1, 2])
    home.poll()
    agent.load(keys(2), [3, 4])
    home.poll()
    assert patience == [WorkerTimeouts().idle_s, WorkerTimeouts().saving_s, 0.0]
