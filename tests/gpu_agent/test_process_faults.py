"""The agents' process is killed, stopped or sends garbage, or the engine's process dies.

The engine's calls return at once, its orders end, its blocks are not accessed afterwards, and
nothing leaks.
"""

import concurrent.futures
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.worker import frames
from gpu_agent.worker.frames import Loaded
from gpu_agent.worker.lookup_client import ProcessLookups
from gpu_agent.worker.process_backend import InflightOrders, ProcessBackend
from gpu_agent.worker.worker_process import WorkerTimeouts
from kvstore import Client, ClientConfig, ConfigError, Namespace
from kvstore.errors import ProtocolError
from kvstore.keys import prefix_hashes
from kvstore.tools.node_process import NodeProcess

BLOCK, BLOCKS = 16, 32
WAIT_S = 120.0  # three starts of torch on a busy machine
# Agents that wait before each copy while a file exists.
GATED = """
import os, sys, time
from gpu_agent.transfer import TorchTransfer
from gpu_agent.worker.__main__ import main

def behind_gate(move):
    def gated(*arguments, **named):
        while os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        return move(*arguments, **named)
    return gated

TorchTransfer.gather = behind_gate(TorchTransfer.gather)
TorchTransfer.scatter = behind_gate(TorchTransfer.scatter)
main(int(sys.argv[2]))
"""
# A stand-in for an agents' process that sends its arguments but the last one, in hex: one after the
# frame of the setup, one after that of the first save. Then it sends and reads nothing.
TALKER = """
import socket, struct, sys, time
channel = socket.socket(fileno=int(sys.argv[-1]))
frames = channel.makefile("rb")
for data, awaited in zip(sys.argv[1:-1], (1, 3)):  # SETUP, SAVE; an ADD is between them
    kind = 0
    while kind != awaited:
        nbytes, kind = struct.unpack("<IB", frames.read(5))
        frames.read(nbytes)
    channel.sendall(bytes.fromhex(data))
time.sleep(600)
"""
READY = "0800000011" + "00" * 8  # ready since long ago


def until(reached: Callable[[], bool], home: ProcessBackend | None = None) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        if home is not None:
            began = time.monotonic()
            home.poll()
            # Shorter than any timeout that poll could wait for.
            assert time.monotonic() - began < 5.0
        time.sleep(0.05)


def keys(count: int) -> list[bytes]:
    return prefix_hashes([secrets.randbelow(1 << 30) for _ in range(count * BLOCK)], BLOCK)


def place() -> ShardPool:
    views = {
        f"layers.{i}": torch.randint(0, 256, (BLOCKS, 2, BLOCK, 8), dtype=torch.uint8)
        for i in (0, 1)
    }
    pool = table_pool(views, BLOCKS, BLOCK)
    return ShardPool(Namespace(f"process {secrets.token_hex(8)}", pool.layout), pool)


def content(place: ShardPool, blocks: list[int]) -> list[torch.Tensor]:
    return [plane.bits[blocks].clone() for plane in place.pool.planes]


IMPATIENT = WorkerTimeouts(grace_s=0.2, restart_s=0.05, close_s=2.0)
# With this restart pause the next process does not start during a test.
ALONE = replace(IMPATIENT, restart_s=60.0)
MakeHome = Callable[..., tuple[ProcessBackend, ShardPool]]


@pytest.fixture
def homes() -> Iterator[MakeHome]:
    made: list[ProcessBackend] = []

    def make(
        address: str, command: list[str], timeouts: WorkerTimeouts = IMPATIENT, **config: Any
    ) -> tuple[ProcessBackend, ShardPool]:
        where = place()
        limits = AgentConfig(staging_nbytes=1 << 16, pending_nbytes_max=1 << 22, **config)
        made.append(
            ProcessBackend([where], ClientConfig(address=address), limits, command, timeouts)
        )
        return made[-1], where

    yield make
    for home in made:
        home.close()
        assert home._child.pid is None
        assert home.check() == []


@pytest.mark.long
def test_process_killed_in_a_save_and_stopped_in_a_load(
    homes: MakeHome,
    shared_node: NodeProcess,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    command = [sys.executable, "-c", GATED, str(gate)]
    home, where = homes(shared_node.address, command, save_timeout_s=30.0, load_timeout_s=3.0)
    (agent,) = home.agents(None)
    assert agent is not None
    chain, blocks = keys(3), [1, 2, 3]
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as store:
        save = agent.save(chain, blocks)
        until(lambda: store.node_status().ram.writing_count > 0, home)
        assert not save.gathered.done()  # the process may be reading
        os.kill(home._child.pid, signal.SIGKILL)
        until(save.done.done, home)
        assert (save.gathered.done(), save.done.result().dropped) == (True, 3)
        until(lambda: store.node_status().ram.writing_count == 0)
        assert store.lookup(where.namespace, chain).prefix_pages == 0

        gate.unlink()
        until(lambda: home._child.ready, home)  # the next process
        save = agent.save(chain, blocks)
        until(save.done.done, home)
        assert save.done.result().stored == 3

        home._child.timeouts = ALONE  # no third process starts
        gate.touch()
        before = content(where, [11, 12, 13])
        load = agent.load(chain, [11, 12, 13])
        os.kill(home._child.pid, signal.SIGSTOP)
        until(load.done.done, home)
        assert load.done.result().pages == 0
        gate.unlink()
        assert all(
            torch.equal(a, b) for a, b in zip(content(where, [11, 12, 13]), before, strict=True)
        )


@pytest.mark.parametrize(
    "data",
    [
        "ffffffff11",  # longer than allowed
        "0000000063",  # of an unknown kind
        "0000000003",  # sent only by the engine
        "0800000012" + "63" * 8,  # an unknown order
        "0300000012" + "00" * 3,  # too short
        "1400000013"
        + "0100000000000000"
        + "09000000"
        + "00000000"
        + "00000000",  # more pages than ordered
        "0800000012" + "0100000000000000" + "0800000012" + "0100000000000000",  # read twice
    ],
)
def test_garbage_ends_the_process_and_its_orders(
    homes: MakeHome, data: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home, _ = homes("127.0.0.1:9", [sys.executable, "-c", TALKER, READY, data], ALONE)
    (agent,) = home.agents(None)
    save = agent.save(keys(2), [1, 2])
    until(lambda: home._child.ready, home)
    until(save.done.done, home)
    assert (save.done.result().stored, save.done.result().dropped) == (0, 2)
    assert "the next one starts in" in caplog.text
    load = agent.load(keys(1), [1])  # fails at once: no process is ready
    assert (load.done.result(0).pages, load.done.result(0).error) == (
        0,
        "the agents' process is not ready",
    )
    assert agent.save(keys(1), [1]).done.result(0).dropped == 1


@pytest.mark.parametrize(("pages", "loaded"), [(3, 2), (2, 3), (1, 2)])
def test_load_result_larger_than_its_order_is_refused(pages: int, loaded: int) -> None:
    orders = InflightOrders()
    number, job = orders.load(2, WAIT_S)
    with pytest.raises(ProtocolError, match="a load of 2 pages ended with"):
        orders.loaded(Loaded(number, pages, loaded, None))
    assert not job.done.done()


def test_silent_process_is_ended_by_the_deadline_of_its_orders(homes: MakeHome) -> None:
    home, _ = homes(
        "127.0.0.1:9", [sys.executable, "-c", TALKER, READY], save_timeout_s=0.3, load_timeout_s=0.2
    )
    (agent,) = home.agents(None)
    until(lambda: home._child.ready, home)
    first = home._child.pid
    began = time.monotonic()
    load, save = agent.load(keys(1), [1]), agent.save(keys(1), [2])
    assert not load.done.done()
    assert not save.gathered.done()
    home.wait([load.done, save.done])
    assert time.monotonic() - began < WAIT_S
    assert (load.done.result().pages, save.done.result().dropped) == (0, 1)
    until(lambda: home._child.ready and home._child.pid != first, home)


# The same, but the start waits, too.
SLOW = f"""
import os, sys, time
while os.path.exists(sys.argv[1]):
    time.sleep(0.01)
{GATED}
"""


def test_late_process_is_not_ended_by_overdue_orders(
    homes: MakeHome, shared_node: NodeProcess, tmp_path: pathlib.Path
) -> None:
    """Neither orders given during a slow start nor a paused engine end a process that answers.

    Otherwise the process would be restarted, given more orders and ended again. After a long step
    or a paused container, overdue orders are answered a moment later.
    """
    patient = replace(IMPATIENT, overdue_s=WAIT_S)
    gate = tmp_path / "gate"
    gate.touch()
    home, _ = homes(
        shared_node.address, [sys.executable, "-c", SLOW, str(gate)], patient, save_timeout_s=0.1
    )
    (agent,) = home.agents(None)
    first = home._child.pid
    save = agent.save(keys(2), [1, 2])
    overdue_at = time.monotonic() + 0.1 + 3 * 0.2
    until(lambda: time.monotonic() > overdue_at, home)
    assert home._child.pid == first
    gate.unlink()
    until(save.done.done, home)
    assert home._child.ready
    assert home._child.pid == first

    gate.touch()
    save = agent.save(keys(2), [1, 2])
    home.poll()
    time.sleep(0.1 + 3 * 0.2)
    home.poll()
    gate.unlink()
    until(save.done.done, home)
    assert home._child.pid == first


def test_unread_orders_do_not_block_the_engine(
    homes: MakeHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders to a process that reads nothing are queued up to a limit, then dropped."""
    monkeypatch.setattr(frames, "UNSENT_NBYTES_MAX", 1 << 20)
    home, _ = homes("127.0.0.1:9", [sys.executable, "-c", TALKER])
    (agent,) = home.agents(None)
    chain, blocks = keys(30), range(30)
    refused = 0
    for _ in range(40_000):
        job = agent.save(chain, blocks)
        if job.done.done():
            refused += 1
            assert "wait for the agents' process" in str(job.done.result().reason)
            if refused == 3:
                break
    assert refused == 3


def test_missing_executable_fails_the_start() -> None:
    with pytest.raises(OSError, match="No such file"):
        ProcessBackend([place()], ClientConfig(), AgentConfig(), ["/nowhere/python"])


def test_restart_pauses_grow(homes: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = homes("127.0.0.1:9", [sys.executable, "-c", "pass"])
    now_s, pauses = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("gpu_agent.worker.worker_process.time", clock)
    for death in range(1, 4):
        until(lambda death=death: home._child._deaths == death, home)
        pauses.append(home._child._restart_at - now_s[0])
        now_s[0] = home._child._restart_at
    assert pauses == pytest.approx([0.05, 0.1, 0.2])


@pytest.mark.parametrize(
    "error", [MemoryError("fork"), RuntimeError("can't fork at interpreter shutdown")]
)
def test_unexpected_start_error_does_not_raise_in_the_engine(
    homes: MakeHome, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    home, _ = homes("127.0.0.1:9", [sys.executable, "-c", "pass"])

    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", failing)
    until(lambda: home._child._deaths == 3, home)


def test_missing_sys_executable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(ConfigError, match=r"sys\.executable"):
        ProcessLookups(ClientConfig())


def test_process_survives_the_thread_that_started_it(shared_node: NodeProcess) -> None:
    """Regression: in a program with one thread per call, the next lookup took half a minute."""
    made = []

    def start() -> None:
        made.append(ProcessLookups(ClientConfig(address=shared_node.address, **PATIENT)))
        assert made[0].await_ready(WAIT_S)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(start).result()
    (asker,) = made
    try:
        for _ in range(3):
            done = asker.look_up([([place().namespace], keys(2))], WAIT_S)
            until(lambda done=done: asker.poll() or done.done())
            assert done.result() == (b"\0\0",)
            time.sleep(0.1)
    finally:
        asker.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older versions always look there first")
def test_files_in_the_working_directory_are_not_imported(
    shared_node: NodeProcess, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('of the user')")
    monkeypatch.chdir(tmp_path)
    asker = ProcessLookups(ClientConfig(address=shared_node.address, **PATIENT))
    try:
        until(lambda: asker._child.ready or asker.poll() or asker._child._deaths)
        assert asker._child.ready
    finally:
        asker.close()


ENGINE = """
import sys, time, torch
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/../helpers"]
from test_process_faults import PATIENT, AgentConfig, ProcessBackend, ClientConfig, keys, place
config = AgentConfig(staging_nbytes=1 << 16, save_timeout_s=600.0)
client = ClientConfig(address=sys.argv[2], wire="shm", **PATIENT)
homes = [ProcessBackend([place()], client, config, sys.argv[3:]) for _ in range(2)]
for home in homes:
    home.agents(None)[0].save(keys(3), [1, 2, 3])
print(*(home._child.pid for home in homes), flush=True)
while True:
    for home in homes:
        home.poll()
    time.sleep(0.01)
"""


def test_killed_engine_leaves_no_processes_or_slots(
    shared_node: NodeProcess, tmp_path: pathlib.Path
) -> None:
    """One of the two agents' processes is stopped and can not notice the engine's end."""
    gate = tmp_path / "gate"
    gate.touch()
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(ENGINE), here, shared_node.address]
    with (
        Client(ClientConfig(address=shared_node.address, **PATIENT)) as store,
        subprocess.Popen(
            [*command, sys.executable, "-c", GATED, str(gate)], stdout=subprocess.PIPE
        ) as engine,
    ):
        try:
            assert engine.stdout is not None
            agents = [int(pid) for pid in engine.stdout.readline().split()]
            until(lambda: store.node_status().ram.writing_count == 6)
            os.kill(agents[0], signal.SIGSTOP)
        finally:
            engine.kill()
        until(lambda: all(map(is_gone, agents)))
        until(lambda: store.node_status().ram.writing_count == 0)


def is_gone(pid: int) -> bool:
    """Return whether the process is dead, even if its parent has not reaped it yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
