"""The agents' process reports the stages of an order in the order that the engine expects."""

import secrets
import threading
import time
from types import SimpleNamespace
from typing import Any

from waiting import wait_until

from gpu_agent.load_pipeline import SaveJob, SaveResult
from gpu_agent.worker import frames
from gpu_agent.worker.agent_worker import AgentWorker
from gpu_agent.worker.frames import Kind, Order
from gpu_agent.worker.process_backend import InflightOrders, new_save
from kvstore.sync import Future


class FailingAgent:
    """An agent whose saves are done at once, and gathered only when `resume` is set."""

    def __init__(self) -> None:
        self.resume = threading.Event()

    def save(self, keys: list[bytes], *_: object, **__: object) -> SaveJob:
        gathered: Any = Future()
        done: Any = Future()

        def release(_: object) -> None:
            assert self.resume.wait(60.0)
            gathered.set_result(None)

        done.add_done_callback(release)
        result = SaveResult(0, 0, len(keys), "the store failed")
        threading.Thread(target=done.set_result, args=(result,)).start()
        wait_until(done.done)
        return SaveJob(gathered, done)


def test_save_that_fails_at_once_is_gathered_before_it_is_saved() -> None:
    """Regression: SAVED came first, and the engine killed the agents' process."""
    sent: list[bytes] = []
    worker, agent = AgentWorker.__new__(AgentWorker), FailingAgent()
    worker._channel = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    worker._events = SimpleNamespace(fence=lambda number: None)  # type: ignore[assignment]
    worker._agents = {1: agent}  # type: ignore[dict-item]
    keys = [secrets.token_bytes(32)]
    worker._save(Order(1, 1, -1, time.monotonic() + 20.0, keys, {"block": bytes(8)}))
    agent.resume.set()
    wait_until(lambda: len(sent) == 2)
    assert [Kind(frame[frames.HEADER.size - 1]) for frame in sent] == [Kind.GATHERED, Kind.SAVED]
    orders = InflightOrders()
    orders.save(1, time.monotonic() + 20.0, new_save())
    orders.gathered(frames.parse_number(sent[0][frames.HEADER.size :]))
    orders.saved(frames.parse_saved(sent[1][frames.HEADER.size :]))
