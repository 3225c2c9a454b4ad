"""An agent whose client talks to a cluster: what a member that hangs costs."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from gpu_agent import Agent, KVPool
from gpu_agent.config import agent_config
from kvstore import Client, ClientConfig, Namespace
from kvstore.measure.node_process import NodeProcess

SAVE_S = 2.0


@pytest.fixture
def fleet() -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [some.getsockname()[1] for some in free]
        for some in free:
            some.close()
        text = "static:fleet/" + ",".join(f"n{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
        ram = ("--ram-bytes", "16MiB", "--extent-bytes", "1MiB")
        yield [
            stack.enter_context(NodeProcess("--port", str(port), *ram, "--cluster", text, "--member", f"n{number}"))
            for number, port in enumerate(ports)
        ]


def test_a_save_beside_a_member_that_hangs(fleet: list[NodeProcess], token_pool: KVPool) -> None:
    namespace = Namespace(model="cluster", layout=token_pool.layout)
    first, second = ([bytes([tag, number]) * 16 for number in range(12)] for tag in (1, 2))
    slots = torch.arange(96)
    config = ClientConfig(address=fleet[0].address, connect_timeout_s=5.0)
    with Client(config) as client, Agent(client, namespace, token_pool, agent_config(save_timeout_s=SAVE_S)) as agent:
        assert agent.save(first, slots, timeout_s=10.0).done.result().stored == 12
        os.kill(fleet[1].pid, signal.SIGSTOP)
        saved = agent.save(second, slots).done.result()
        assert saved.stored > 0
        assert saved.reason == "members of the cluster do not answer"
