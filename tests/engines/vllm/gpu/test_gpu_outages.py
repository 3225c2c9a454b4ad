"""Kill or stop the node, the agents' process or the engine itself, on a GPU.

No request fails, every answer equals the one without a store, and no resource leaks.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engine_answers import agree, answers, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import agents_ready, hits_again, stored
from processes import GONE_S, children, gone, wait_gone
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]


@pytest.fixture(scope="module")
def plain(on_gpu: Engines) -> EngineHandle:
    return on_gpu("plain", enforce_eager=True)


@pytest.fixture(scope="module")
def engine(on_gpu: Engines, store: RestartableNode) -> EngineHandle:
    """Return the engine whose store fails."""
    found = on_gpu(
        "victim", store={"address": store.address, "load_timeout_s": 5.0}, enforce_eager=True
    )
    agents_ready(found)
    return found


@pytest.fixture(autouse=True)
def node_is_back(store: RestartableNode) -> Iterator[None]:
    yield
    store.start()


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1, 0.3])
def test_node_killed_during_saves_and_loads(
    delay_s: float, plain: EngineHandle, engine: EngineHandle, store: RestartableNode
) -> None:
    """The node is killed while half of the prompts are saved and half loaded."""
    seed = 1000 + round(delay_s * 1000)
    known = [prompt(seed * 10 + i, 400) for i in range(6)]
    fresh = [prompt(seed * 10 + 6 + i, 400) for i in range(6)]
    expected = plain.alone(*known, *fresh)
    hits_again(engine, seed * 100)
    stored(engine, *known)
    store.flush()
    engine.reset()
    killer = threading.Timer(delay_s, store.end)
    killer.start()
    found = engine.generate(*known, *fresh)
    killer.join()
    assert agree(found, expected)
    engine.settle()
    store.start()
    hits_again(engine, seed * 100 + 50)
    again = engine.alone(*known, *fresh)
    assert agree(again, expected), "a page stored in the meantime is wrong"
    assert answers(engine.alone(*known)) == answers(found_locally(engine, *known))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_agents_process_killed_or_stopped_during_saves_and_loads(
    how: str, plain: EngineHandle, engine: EngineHandle, store: RestartableNode
) -> None:
    """A stopped agents' process is killed once its work is overdue."""
    seed = 300 if how == "kill" else 400
    known = [prompt(seed + i, 400) for i in range(6)]
    fresh = [prompt(seed + 6 + i, 400) for i in range(6)]
    expected = plain.alone(*known, *fresh)
    hits_again(engine, seed * 100)
    stored(engine, *known)
    engine.reset()
    (worker,) = agents_ready(engine)
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    killer = threading.Timer(
        random.Random(seed).random() * 0.05, os.kill, (worker["pid"], numbers[how])
    )
    killer.start()
    found = engine.generate(*known, *fresh)
    killer.join()
    assert agree(found, expected)
    engine.settle()
    hits_again(engine, seed * 100 + 50)
    (other,) = agents_ready(engine)
    assert other["pid"] != worker["pid"]
    assert gone(worker["pid"])
    assert agree(engine.alone(*known, *fresh), expected)


def on_the_gpu() -> set[int]:
    """Return the processes that hold memory of a GPU. Other engines come and go meanwhile."""
    query = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60.0)
    return {int(pid) for pid in found.stdout.split()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_engine_leaves_nothing_behind(
    number: signal.Signals, on_gpu: Engines, store: RestartableNode
) -> None:
    """No process, no GPU memory and no open slot of the node leaks."""
    engine = on_gpu(f"ended by {number.name}", store={"address": store.address}, enforce_eager=True)
    (worker,) = agents_ready(engine)
    whole = prompt(500 + number, 400)
    stored(engine, whole)
    processes = children(engine.pid)
    assert worker["pid"] in processes
    assert len(processes) >= 2, "expected the agents' process and the lookup process"
    assert {engine.pid, worker["pid"]} <= on_the_gpu()
    os.kill(engine.pid, number)
    wait_gone([engine.pid, *processes])
    end = time.monotonic() + GONE_S
    while on_the_gpu() & {engine.pid, *processes}:
        assert time.monotonic() < end, "GPU memory was not freed"
        time.sleep(0.05)
    store.wait_nothing_open()
