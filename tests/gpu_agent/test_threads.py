"""A process that can start no more threads, because of `ulimit -u` or a container's limit.

The engine continues, and whatever would need a thread is a miss.
"""

import os
import threading
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent.blocks.lookups import Lookups, ThreadLookups
from gpu_agent.bounded_executor import BoundedExecutor
from kvstore import Client, ClientConfig, Namespace
from kvstore.keys import prefix_hashes
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

WAIT_S = 60.0


def test_job_without_a_thread_is_refused_and_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane: BoundedExecutor[str] = BoundedExecutor("load", 1, (1, 64), 1 << 20)
    ran = []

    def work(name: str) -> Any:
        def run(_: torch.Tensor) -> str:
            ran.append(name)
            return name

        return run

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        refused = lane.submit(16, work("first"), lambda reason: f"failed: {reason}")
        assert refused.result(0) == "failed: can't start new thread"
    assert lane.pending_nbytes == 0
    assert lane.submit(16, work("second"), str).result(WAIT_S) == "second"
    lane.close(WAIT_S)
    assert ran == ["second"]  # the engine has reused the first job's slots
    assert lane.check() == []


def test_job_in_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads belong to the parent process, so the result would never come."""
    lane: BoundedExecutor[str] = BoundedExecutor("save", 1, (1, 64), 1 << 20)
    assert lane.submit(16, lambda _: "done", str).result(WAIT_S) == "done"
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        assert "before a fork" in lane.submit(16, lambda _: "done", str).result(0)
    lane.close(WAIT_S)


def test_lookup_without_a_thread_is_a_miss(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, keys = Namespace("no threads", opaque_layout(4096)), prefix_hashes(range(32), 16)
    lookups = Lookups(
        ThreadLookups(Client(ClientConfig(address=shared_node.address, **PATIENT))), 5.0
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        lookups.open([namespace])
        lookups.ask("r", [([namespace], keys)])
        lookups.touch("a request", [([namespace], keys)])
        assert lookups.answer("r") == (bytes(2),)
    assert lookups.check() == []
    lookups.close()


def _refuse(_: object) -> None:
    raise RuntimeError("can't start new thread")
