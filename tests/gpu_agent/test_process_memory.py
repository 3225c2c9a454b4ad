"""The agents' process runs out of memory: at its start, in a save, in a load.

Orders end, blocks reported as loaded have correct bytes, and everything works once there is memory.
"""

import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.worker.process_backend import ProcessBackend
from gpu_agent.worker.worker_process import WorkerTimeouts
from kvstore import Client, ClientConfig, Namespace
from kvstore.keys import prefix_hashes
from kvstore.tools.node_process import NodeProcess

BLOCK, BLOCKS, WAIT_S = 16, 64, 120.0
SOON = WorkerTimeouts(restart_s=0.05)
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
# Agents whose copies run out of memory while a file exists, with torch's and Python's errors.
WITHOUT = """
import os, sys, torch
from gpu_agent.transfer import TorchTransfer
from gpu_agent.worker.__main__ import main

def lacking(move, error):
    def moved(*arguments, **named):
        if os.path.exists(sys.argv[1]):
            raise error
        return move(*arguments, **named)
    return moved

TorchTransfer.gather = lacking(TorchTransfer.gather, torch.OutOfMemoryError("CUDA out of memory"))
TorchTransfer.scatter = lacking(TorchTransfer.scatter, MemoryError())
main(int(sys.argv[2]))
"""
# A process without enough memory to start.
SMALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
from gpu_agent.worker.__main__ import main
main(int(sys.argv[1]))
"""


def until(reached: Callable[[], bool], home: ProcessBackend) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        home.poll()
        time.sleep(0.02)


def keys(count: int) -> list[bytes]:
    return prefix_hashes([secrets.randbelow(1 << 30) for _ in range(count * BLOCK)], BLOCK)


def content(where: ShardPool, blocks: list[int]) -> list[torch.Tensor]:
    return [plane.bits[blocks].clone() for plane in where.pool.planes]


@pytest.fixture
def homes(shared_node: NodeProcess) -> Iterator[Any]:
    made: list[ProcessBackend] = []

    def make(command: list[str]) -> tuple[ProcessBackend, ShardPool]:
        views = {
            f"layers.{i}": torch.randint(0, 256, (BLOCKS, 2, BLOCK, 8), dtype=torch.uint8)
            for i in (0, 1)
        }
        pool = table_pool(views, BLOCKS, BLOCK)
        where = ShardPool(Namespace(f"memory {secrets.token_hex(8)}", pool.layout), pool)
        config = AgentConfig(
            staging_nbytes=1 << 16,
            pending_nbytes_max=1 << 22,
            save_timeout_s=8.0,
            load_timeout_s=8.0,
        )
        made.append(
            ProcessBackend(
                [where], ClientConfig(address=shared_node.address, **PATIENT), config, command, SOON
            )
        )
        return made[-1], where

    yield make
    for home in made:
        home.close()
        assert home.check() == []


def test_copies_without_memory_fail_and_recover(
    homes: Any, shared_node: NodeProcess, tmp_path: Path
) -> None:
    none_left = tmp_path / "none left"
    home, where = homes([sys.executable, "-c", WITHOUT, str(none_left)])
    (agent,) = home.agents(None)
    until(lambda: home.loads, home)
    chain, blocks = keys(3), [1, 2, 3]

    none_left.touch()
    save = agent.save(chain, blocks)
    until(save.done.done, home)
    assert save.gathered.done()
    assert save.done.result().stored == 0
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as store:
        assert store.lookup(where.namespace, chain).prefix_pages == 0
        assert store.node_status().ram.writing_count == 0

    none_left.unlink()
    before = content(where, blocks)
    save = agent.save(chain, blocks)
    until(save.done.done, home)
    assert save.done.result().stored == 3
    none_left.touch()
    load = agent.load(chain, [4, 5, 6])
    until(load.done.done, home)
    assert load.done.result().pages == 0
    none_left.unlink()
    load = agent.load(chain, [4, 5, 6])
    until(load.done.done, home)
    assert load.done.result().pages == 3
    assert all(
        torch.equal(here, there)
        for here, there in zip(before, content(where, [4, 5, 6]), strict=True)
    )


@pytest.mark.long
def test_process_without_more_memory_fails_and_recovers(homes: Any) -> None:
    home, where = homes([])
    (agent,) = home.agents(None)
    until(lambda: home.loads, home)
    chain, blocks = keys(20), list(range(1, 21))
    expected = content(where, blocks)
    save = agent.save(chain, blocks)
    until(save.done.done, home)
    assert save.done.result().stored == 20
    pid = home._child.pid
    assert pid is not None
    # Less than the process already uses, so that it gets no more.
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    jobs = [
        agent.load(chain, list(range(21, 41))),
        agent.save(keys(20), blocks),
        agent.load(chain, list(range(41, 61))),
    ]
    until(lambda: all(job.done.done() for job in jobs), home)
    for job, first in ((jobs[0], 21), (jobs[2], 41)):
        pages = job.done.result().pages
        found = content(where, list(range(first, first + pages)))
        assert all(
            torch.equal(here[:pages], there) for here, there in zip(expected, found, strict=True)
        )
    if home._child.pid == pid:
        resource.prlimit(pid, resource.RLIMIT_AS, UNLIMITED)
    until(lambda: home.loads, home)
    load = agent.load(chain, list(range(21, 41)))
    until(load.done.done, home)
    assert load.done.result().pages == 20


def test_start_without_memory_drops_orders(homes: Any) -> None:
    home, _ = homes([sys.executable, "-c", SMALL])
    (agent,) = home.agents(None)
    save = agent.save(keys(2), [1, 2])
    until(save.done.done, home)
    assert (save.gathered.done(), save.done.result().stored) == (True, 0)
    assert agent.load(keys(2), [1, 2]).done.result().pages == 0
