"""Steps in which no block ends cost the engine next to nothing: whom they hold is not looked at, and nothing is lost
by that. The process beside the engine is asked only when it owes something."""

import concurrent.futures
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from block_store import BLOCK, FakeRequest

from gpu_agent.blocks import request as request_module
from gpu_agent.blocks.groups import NULL_BLOCK, BlockGroup
from gpu_agent.blocks.homes import Place
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.blocks.orders import Report
from gpu_agent.blocks.request import STAGED_BLOCKS
from gpu_agent.blocks.save_plan import SavePlan
from gpu_agent.blocks.scheduler import BlockScheduler
from gpu_agent.config import AgentConfig
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.process import asking, frames
from gpu_agent.process.asking import AskProcess
from gpu_agent.process.channel import EngineEnd
from gpu_agent.process.child import IDLE_S, Child
from gpu_agent.process.frames import Answer, Kind
from gpu_agent.process.home import SAVING_S, AgentProcess
from kvstore import Namespace
from kvstore.config import ClientConfig
from kvstore.layout import opaque_layout

NAMESPACE = Namespace("quiet", opaque_layout(4096))


class Nothing:
    """An asker who knows of nothing."""

    def look_up(self, question: Any, timeout_s: float) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(tuple(bytes(len(keys)) for _, keys in question))
        return done

    def touch(self, question: Any, timeout_s: float) -> Any:
        return self.look_up(question, timeout_s)

    def open(self, namespaces: Any, timeout_s: float) -> Any:
        return self.look_up((), timeout_s)

    def poll(self) -> None: ...

    def pause(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class Side:
    """A scheduler's side whose tables are looked at, and how often. `looks`: at every request in every step."""

    def __init__(self, looks: bool, blocks_max: int, sync: bool = False) -> None:
        self.looks, self.scarce, self.looked = looks, False, 0
        plan = SavePlan(1, blocks_max, 4, lambda _: None, lambda _: None, scarce=lambda: self.scarce)
        lookups = Lookups(Nothing(), 5.0)
        self.scheduler = BlockScheduler([BlockGroup(BLOCK)], [[NAMESPACE]], BLOCK, BLOCK, lookups, plan, sync)
        self.jobs: list[int] = []

    def admit(self, request: FakeRequest, table: list[int], tokens: int = 0) -> None:
        self.scheduler.ask(request)
        assert self.scheduler.matched(request, 0) == 0
        self.scheduler.allocated(request, [table], tokens)

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]], clean: bool) -> list[Any]:
        if self.looks:
            self.scheduler._quiet = 0

        def table_of(name: str) -> list[list[int]]:
            self.looked += 1
            return [tables[name]]

        orders = self.scheduler.step(scheduled, table_of)
        self.jobs += [order.job for order in orders.saves]
        acknowledged = {self.jobs.pop(0): 1} if self.jobs and clean else {}
        self.scheduler.ran(Report(orders.step, acknowledged))
        assert self.scheduler.check() == []
        return [order.parts for order in orders.saves]


@pytest.mark.parametrize("blocks_max", [6, 1000])
def test_what_is_saved_and_when_is_what_it_would_be_with_a_look_at_everybody(seed: int, blocks_max: int) -> None:
    draw = random.Random(seed)
    sides = [Side(True, blocks_max), Side(False, blocks_max)]
    live: dict[str, FakeRequest] = {}
    tables: dict[str, list[int]] = {}
    ended, saved = 0, 0
    for step in range(600):
        if len(live) < 5 and draw.random() < 0.1:
            name = f"r{step}"
            live[name] = FakeRequest(name, [draw.randrange(1 << 30) for _ in range(draw.randrange(1, 150))])
            tables[name] = [1 + step * 64 + block for block in range(64)]
            for side in sides:
                side.scheduler.ask(live[name])
                assert side.scheduler.matched(live[name], 0) == 0
                side.scheduler.allocated(live[name], [tables[name]], 0)
        scarce = draw.random() < 0.05
        scheduled = {}
        for name, request in live.items():
            left = request.num_tokens - request.num_computed_tokens
            if draw.random() < 0.97:
                scheduled[name] = min(left, draw.choice([1, 16, 64, 200])) if left > 1 else draw.choice([1] * 30 + [3])
        clean = draw.random() < 0.8
        for side in sides:
            side.scarce = scarce
        looked, told = (side.step(scheduled, tables, clean) for side in sides)
        assert looked == told
        saved += sum(len(part.keys) for parts in told for part in parts)
        for name, tokens in scheduled.items():
            request = live[name]
            request.num_computed_tokens += tokens
            while request.num_tokens <= request.num_computed_tokens:  # the answer grows
                request.tokens.append(draw.randrange(1 << 30))
            FakeRequest.__post_init__(request)
        for name in [
            name for name, request in live.items() if request.num_computed_tokens > 900 or draw.random() < 0.003
        ]:
            request = live.pop(name)
            ended += 1
            for side in sides:
                side.scheduler.finished(request, [tables[name]])
    assert ended
    assert saved > 20
    assert sides[1].looked <= sides[0].looked


def test_requests_that_end_no_block_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "STAGED_BLOCKS", 4)
    side, request = Side(False, 1000), FakeRequest("r", list(range(40)))
    side.scheduler.ask(request)
    assert side.scheduler.matched(request, 0) == 0
    side.scheduler.allocated(request, [[1, 2, 3, 4, 5, 6, 7, 8]], 0)
    side.step({"r": 40}, {"r": list(range(1, 9))}, True)
    request.num_computed_tokens = 40
    looked, read = side.looked, 0

    class Counted(FakeRequest):
        def __getattribute__(self, name: str) -> Any:
            nonlocal read
            read += name == "num_computed_tokens"
            return super().__getattribute__(name)

    side.scheduler._requests["r"].request = counted = Counted("r", request.tokens, 40)
    for step in range(60):
        side.step({"r": 1}, {"r": list(range(1, 9))}, True)
        object.__setattr__(counted, "num_computed_tokens", vars(counted)["num_computed_tokens"] + 1)
        if step == 54:
            assert (side.looked, read) == (looked, 0)
    assert side.looked > looked  # 96 tokens are six blocks, four of them of the answer


def test_a_request_that_joins_a_quiet_step_is_looked_at() -> None:
    side, tables = Side(False, 1000), {"r": list(range(1, 9)), "s": [11, 12]}
    side.admit(request := FakeRequest("r", list(range(40))), tables["r"])
    side.step({"r": 40}, tables, True)
    request.num_computed_tokens = 40
    side.step({"r": 1}, tables, True)
    request.num_computed_tokens = 41
    side.admit(FakeRequest("s", list(range(100, 117)), BLOCK - 1), tables["s"])  # all but a token of it is cached
    side.step({"r": 1, "s": 1}, tables, True)
    request.num_computed_tokens = 42
    assert [part.blocks for parts in side.step({"r": 1}, tables, True) for part in parts] == [[11]]


def test_who_may_have_read_what_a_failed_load_left_is_not_stored_though_steps_were_quiet() -> None:
    side, tables = Side(False, 1000, sync=True), {"r": list(range(1, 30)), "s": list(range(31, 35))}
    side.admit(reader := FakeRequest("r", list(range(40))), tables["r"])
    side.admit(loader := FakeRequest("s", list(range(100, 140))), tables["s"], BLOCK)
    scheduler, saved = side.scheduler, list[Any]()
    orders = scheduler.step({"r": 40, "s": 24}, lambda name: [tables[name]])
    assert [load.request_id for load in orders.loads] == ["s"]
    reader.num_computed_tokens, loader.num_computed_tokens = 40, 0
    ahead = scheduler.step({"r": 1}, lambda name: [tables[name]])  # the engine is a step ahead
    reader.num_computed_tokens = 41
    scheduler.ran(Report(orders.step, failed={"s"}))
    reads = scheduler.step({"r": 1}, lambda name: [tables[name]])
    loader.num_computed_tokens = 40  # computed again
    for step in (ahead.step, reads.step):
        scheduler.ran(Report(step))
    for _ in range(STAGED_BLOCKS * BLOCK + 60):
        reader.tokens.append(len(reader.tokens))
        reader.num_computed_tokens += 1
        FakeRequest.__post_init__(reader)
        saved += side.step({"r": 1}, tables, True)
    assert saved == []


def test_what_is_being_loaded_is_not_stored_and_what_a_window_left_is_not_loaded() -> None:
    side, tables = Side(False, 1000), {"r": [1, NULL_BLOCK, 3, 4]}
    side.admit(FakeRequest("r", list(range(60)), 3 * BLOCK), tables["r"], 3 * BLOCK)
    (load,) = side.scheduler.step({"r": 12}, lambda name: [tables[name]]).loads
    hashes = side.scheduler._requests["r"].request.block_hashes
    assert [(part.blocks, part.keys) for part in load.parts] == [([1, 3], [hashes[0], hashes[2]])]
    assert not side.scheduler.busy


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AskProcess, socket.socket]]:
    """A process that asks, played by the test: the other end of its socket."""
    ours, theirs = socket.socketpair()

    def start(self: Child) -> None:
        self._channel, self.ready, self._process = EngineEnd(ours), True, object()  # type: ignore[assignment]

    monkeypatch.setattr(Child, "start", start)
    with ours, theirs:
        yield AskProcess(ClientConfig()), theirs


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


def keys(count: int) -> Sequence[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def test_of_many_questions_at_once_the_first_goes_and_the_others_go_together(played: Any) -> None:
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


def test_what_a_process_that_died_owed_nobody_waits_for(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    asked = asker.look_up([([NAMESPACE], keys(1))], 5.0)
    asker.lost()
    assert isinstance(asked.exception(), asking.Unavailable)
    patience: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(Child, "poll", lambda self, patience_s=0.0: patience.append(patience_s))
        asker.poll()
    assert patience == [IDLE_S]
    heard(sock)
    asker.look_up([([NAMESPACE], keys(1))], 5.0)
    assert len(heard(sock)) == 1  # alone: at once


def test_a_process_that_owes_nothing_is_not_asked_what_it_said(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    done = asker.touch([([NAMESPACE], keys(1))], 5.0)  # goes with the next poll, and nobody waits for its answer
    listens = 0
    for _ in range(50):
        asker.poll()
    assert listens <= 2
    _, (_, body) = heard(sock)
    sock.send(frames.answer_frame(Answer(frames.parse_question(body).number, 0, None, ())))
    monkeypatch.setattr("gpu_agent.process.asking.IDLE_S", 0.0)
    asker.poll()
    assert done.result() is None
    done = asker.look_up([([NAMESPACE], keys(1))], 5.0)
    listens = 0
    monkeypatch.setattr("gpu_agent.process.asking.IDLE_S", 60.0)
    for _ in range(5):
        asker.poll()
    assert listens == 5


@pytest.mark.parametrize("there", [b"\2", b"\1\0x", b"x\1\0"])
def test_an_answer_that_says_neither_yes_nor_no_ends_the_process(played: Any, there: bytes) -> None:
    asker, sock = played
    asker.open([NAMESPACE], 5.0)
    heard(sock)
    asker.look_up([([NAMESPACE], keys(len(there)))], 5.0)
    ((_, body),) = heard(sock)
    body = frames.answer_frame(Answer(frames.parse_question(body).number, 0, None, [there]))[frames.HEADER.size :]
    with pytest.raises(asking.ProtocolError, match="neither yes nor no"):
        asker.hear(Kind.ANSWER, body)


def test_requests_that_end_in_one_step_are_told_of_together(played: Any) -> None:
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
    for question in questions:
        sock.send(frames.answer_frame(Answer(question.number, 0, None, ())))
    lookups.poll()
    assert heard(sock) == []


def test_what_is_told_together_fits_a_frame(played: Any) -> None:
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
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 80)
    asker, sock = played
    lookups = Lookups(asker, 5.0)
    for step in range(2):
        for number in range(50):
            lookups.touch(f"r{step}-{number}", [([NAMESPACE], keys(1))])
        lookups.poll()
    told = [frames.parse_question(body) for kind, body in heard(sock) if kind is Kind.TOUCH]
    assert [len(question.groups) for question in told] == [16, 16, 8] * 2


def test_touches_under_way_have_a_limit_and_make_room_when_they_end(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 8)
    monkeypatch.setattr("gpu_agent.process.asking.IDLE_S", 0.0)
    asker, sock = played
    lookups = Lookups(asker, 5.0)
    for _ in range(2):
        for number in range(6):
            lookups.touch(f"r{number}", [([NAMESPACE], keys(1))])
            lookups.poll()
        told = [frames.parse_question(body) for kind, body in heard(sock) if kind is Kind.TOUCH]
        assert len(told) == 4
        for question in told:
            sock.send(frames.answer_frame(Answer(question.number, 0, None, ())))
        lookups.poll()


def test_an_engine_that_loads_listens_in_every_step(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []
    monkeypatch.setattr(Child, "poll", lambda self, patience_s=0.0: patience.append(patience_s))
    layers = {"layers.0": torch.zeros((8, 2, BLOCK, 8), dtype=torch.uint8)}
    pool = table_pool(layers, 8, BLOCK)
    home = AgentProcess([Place(Namespace("quiet", pool.layout), pool)], ClientConfig(), AgentConfig())
    (agent,) = home.agents(None)
    assert agent is not None
    home.poll()
    agent.save(keys(2), [1, 2])
    home.poll()
    agent.load(keys(2), [3, 4])
    home.poll()
    assert patience == [IDLE_S, SAVING_S, 0.0]
