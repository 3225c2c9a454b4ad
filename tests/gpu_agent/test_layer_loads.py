"""A layer-by-layer load with a missing page reports no layer as placed."""

import uuid

import pytest
import torch

from gpu_agent.agent import Agent
from gpu_agent.options import AgentConfig
from gpu_agent.pool import KVPool
from kvstore import Client, Namespace, prefix_hashes

PAGES, WAIT_S = 6, 30.0
NAMES = prefix_hashes(list(range(8 * PAGES)), 8)


@pytest.mark.parametrize("in_one", [True, False], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("gone", [0, 1, PAGES - 1])
def test_placed_with_a_page_gone_is_not_called(
    client: Client, token_pool: KVPool, gone: int, in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver of `placed` takes the slots of the missing page for loaded."""
    nbytes = PAGES * token_pool.layout.page_nbytes if in_one else 4096
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", nbytes)
    namespace = Namespace(model=f"layer-loads-{uuid.uuid4()}", layout=token_pool.layout)
    source, target = torch.randperm(96).split(48)
    with Agent(client, namespace, token_pool, AgentConfig(staging_nbytes=nbytes)) as agent:
        agent.save(NAMES, source).done.result(WAIT_S)
        assert client.remove(namespace, [NAMES[gone]]) == [True]
        placed: list[int] = []
        result = agent.load(
            NAMES, target, placed=lambda layer, _: placed.append(layer)
        ).done.result(WAIT_S)
    assert result.pages == gone
    assert placed == []
