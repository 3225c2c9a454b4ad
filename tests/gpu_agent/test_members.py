"""An agent with a client of a cluster: the cost of a member that hangs.

The tests share two members. Each has a namespace of its own.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from ports import free_ports
from waiting import wait_until

from gpu_agent import Agent, KVPool, LoadResult, SaveResult
from gpu_agent.options import agent_config
from gpu_agent.transfer_path import MappedPath
from kvstore import Client, ClientConfig, Namespace
from kvstore.cluster.view import State, view_message
from kvstore.tools.node_process import NodeProcess

SAVE_S = 6.0  # enough for the pages of the other member on a busy machine


@pytest.fixture(scope="module")
def members() -> Iterator[list[NodeProcess]]:
    """Start two members, the first of which may be a near node."""
    with ExitStack() as stack:
        ports = free_ports(2)
        text = "static:fleet/" + ",".join(
            f"n{number}=127.0.0.1:{port}" for number, port in enumerate(ports)
        )
        ram, shm = ("--ram-bytes", "16MiB", "--extent-bytes", "1MiB"), ("auto", "none")
        yield [
            stack.enter_context(
                NodeProcess(
                    *("--port", str(port), *ram, "--shm-socket", shm[number]),
                    *("--cluster", text, "--member", f"n{number}"),
                )
            )
            for number, port in enumerate(ports)
        ]


@pytest.fixture
def fleet(members: list[NodeProcess]) -> Iterator[list[NodeProcess]]:
    yield members
    for node in members:
        node.resume()


def test_save_with_a_hung_member_is_partial(fleet: list[NodeProcess], token_pool: KVPool) -> None:
    namespace = Namespace(model="cluster", layout=token_pool.layout)
    first, second = ([bytes([tag, number]) * 16 for number in range(12)] for tag in (1, 2))
    slots = torch.arange(96)
    config = ClientConfig(address=fleet[0].address, connect_timeout_s=5.0, near="none")
    with (
        Client(config) as client,
        Agent(client, namespace, token_pool, agent_config(save_timeout_s=SAVE_S)) as agent,
    ):
        assert agent.save(first, slots, timeout_s=60.0).done.result().stored == 12
        os.kill(fleet[1].pid, signal.SIGSTOP)
        saved = agent.save(second, slots).done.result()
        assert saved.stored > 0
        assert saved.reason == "members of the cluster do not answer"


@pytest.mark.parametrize("what", ["load", pytest.param("save", marks=pytest.mark.long)])
def test_job_continues_with_the_owners_when_the_near_node_hangs(
    fleet: list[NodeProcess], token_pool: KVPool, what: str
) -> None:
    namespace = Namespace(model=f"goes on {what}", layout=token_pool.layout)
    config = ClientConfig(address=fleet[0].address, connect_timeout_s=5.0, backoff_s_max=600.0)
    # The near node may use half of it; the rest must be enough for the owners on a busy machine
    options = agent_config(save_timeout_s=16.0, load_timeout_s=16.0)
    with Client(config) as client, Agent(client, namespace, token_pool, options) as agent:
        view = client.view()
        assert view is not None
        keys = [number.to_bytes(16, "big") for number in range(100)]
        owners = view.owners.owners(namespace.digest, keys)
        chain, slots = (
            [key for key, own in zip(keys, owners, strict=True) if own == ("n1",)][:12],
            torch.arange(96),
        )
        client.open(namespace)
        if what == "load":
            with (
                Client(replace(config, near="none")) as other,
                Agent(other, namespace, token_pool, options) as far,
            ):
                assert far.save(chain, slots).done.result().stored == 12
        assert client.maps_arena
        os.kill(fleet[0].pid, signal.SIGSTOP)
        if what == "load":
            assert agent.load(chain, slots).done.result() == LoadResult(12, 12)
        else:
            assert agent.save(chain, slots).done.result() == SaveResult(12, 0, 0)
        assert not client.maps_arena


def test_jobs_with_a_hung_near_node_use_the_owners(
    fleet: list[NodeProcess], token_pool: KVPool
) -> None:
    """Regression: all jobs failed at once until the near node's circuit breaker let one try."""
    namespace = Namespace(model="near", layout=token_pool.layout)
    config = ClientConfig(address=fleet[0].address, connect_timeout_s=5.0, backoff_s_max=600.0)
    with (
        Client(config) as client,
        Agent(client, namespace, token_pool, agent_config(lookup_timeout_s=10.0)) as agent,
    ):
        view = client.view()
        assert view is not None
        keys = [number.to_bytes(16, "big") for number in range(100)]
        owners = view.owners.owners(namespace.digest, keys)
        chain, slots = (
            [key for key, own in zip(keys, owners, strict=True) if own == ("n1",)][:12],
            torch.arange(96),
        )
        client.open(namespace)
        assert client.maps_arena
        os.kill(fleet[0].pid, signal.SIGSTOP)
        assert agent.lookup(chain) == 0
        assert agent.save(chain, slots).done.result().stored == 12
        assert agent.lookup(chain) == 12
        assert agent.load(chain, slots).done.result() == LoadResult(12, 12)
        assert not client.maps_arena


@pytest.mark.parametrize(("step", "before"), [(4, 2), pytest.param(8, 1, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["load", "save"])
def test_job_continues_with_the_owners_when_the_near_node_is_drained(
    fleet: list[NodeProcess],
    token_pool: KVPool,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    step: int,
    before: int,
) -> None:
    """The client learns of the drained node between two parts.

    The chain is still touched as a whole.
    """
    namespace = Namespace(model=f"near no more {what} {step}", layout=token_pool.layout)
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", step * token_pool.layout.page_nbytes)
    config = ClientConfig(address=fleet[0].address, timeout_s=60.0, connect_timeout_s=20.0)
    options = agent_config(save_timeout_s=60.0, load_timeout_s=60.0)
    chain, slots = [number.to_bytes(16, "big") for number in range(12)], torch.arange(96)
    with Client(config) as client, Agent(client, namespace, token_pool, options) as agent:
        if what == "load":
            assert agent.save(chain, slots).done.result().stored == 12
            with Client(replace(config, near="none")) as far:  # the near node sends them later
                wait_until(lambda: far.lookup(namespace, chain).prefix_pages == 12)
        client.open(namespace)
        assert client.maps_arena
        view = client.view()
        assert view is not None
        drained = replace(view.members[0], state=State.DRAINING)
        later = replace(view, number=view.number + 1, members=(drained, *view.members[1:]))
        method = "fetch" if what == "load" else "save"
        move, parts = getattr(MappedPath, method), []

        def moved(self: MappedPath, *arguments: Any) -> Any:
            done = move(self, *arguments)
            parts.append(1)
            if len(parts) == before:
                client._fan_out.nodes._take(view_message(later))
            return done

        touched: list[list[bytes]] = []
        monkeypatch.setattr(
            agent, "_touch", lambda job, prefix_hashes: touched.append(prefix_hashes)
        )
        monkeypatch.setattr(MappedPath, method, moved)
        if what == "load":
            assert agent.load(chain, slots).done.result() == LoadResult(12, 12)
        else:
            assert agent.save(chain, slots).done.result() == SaveResult(12, 0, 0)
        assert not client.maps_arena
        assert len(parts) == before
        wait_until(lambda: touched == [chain])
