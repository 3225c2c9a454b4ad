"""An agent of a namespace with a page key: no in-place copies, and a forged page ends a load."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, hashes, pages_at

from gpu_agent import Agent, AgentConfig, KVPool
from gpu_agent.options import Identity, read_options
from kvstore import Client, ClientConfig, ConfigError, Namespace
from kvstore.page_hmac import page_keys
from kvstore.tools.node_process import NodeProcess

SECRET = "5a" * 32


@pytest.fixture(params=["shm", "bulk"])
def client(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Client]:
    config = ClientConfig(
        shared_node.address, wire=request.param, connect_timeout_s=20.0, timeout_s=30.0
    )
    with Client(replace(config, page_key=SECRET)) as client:
        yield client


@pytest.fixture
def namespace(token_pool: KVPool, client: Client) -> Namespace:
    return Namespace(model=f"keyed {uuid.uuid4()}", layout=token_pool.layout, key_id=client.key_id)


@pytest.fixture
def agent(client: Client, namespace: Namespace, token_pool: KVPool) -> Iterator[Agent]:
    with Agent(client, namespace, token_pool, AgentConfig(workers=2, staging_nbytes=8192)) as agent:
        yield agent
        assert agent.check() == []


def save(agent: Agent) -> None:
    result = agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert (result.stored, result.reason) == (PAGES, None)


def test_round_trip_of_sealed_pages(agent: Agent, client: Client, token_pool: KVPool) -> None:
    agent.prepare()
    save(agent)
    assert client.wire_name == client.config.wire
    loaded = agent.load(hashes(), TARGET).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (PAGES, None)
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))
    assert agent.stats.pages_forged == 0


def test_load_ends_at_a_page_of_a_writer_without_the_key(
    agent: Agent, shared_node: NodeProcess, namespace: Namespace, token_pool: KVPool
) -> None:
    """A writer without the key stored the page first."""
    stranger_config = ClientConfig(
        shared_node.address, connect_timeout_s=20.0, timeout_s=30.0, page_key="6b" * 32
    )
    with Client(stranger_config) as stranger:
        assert stranger._page_keys is not None
        stranger._page_keys.key_id = namespace.key_id  # pretend to have the key
        stranger.put(namespace, hashes()[2:3], [bytes(namespace.layout.page_nbytes)])
    result = agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert (result.stored, result.existing) == (PAGES - 1, 1)
    before = pages_at(token_pool, TARGET)
    loaded = agent.load(hashes(), TARGET).done.result(WAIT_S)
    assert loaded.pages == 2
    assert agent.stats.pages_forged == 1
    after = pages_at(token_pool, TARGET)
    assert torch.equal(after[:2], pages_at(token_pool, SOURCE)[:2])
    assert torch.equal(after[2:], before[2:])
    save_again = agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert (save_again.stored, save_again.existing) == (1, PAGES - 1)
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES


def test_page_key_makes_namespaces_keyed(
    token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_options({"model": "m"})
    assert plain.identity.namespace(token_pool.layout, "facts").key_id == ""
    monkeypatch.setenv("KVSTORE_PAGE_KEY", SECRET)
    options = read_options({"model": "m"})
    keys = page_keys(options.client)
    assert keys is not None
    assert options.identity.namespace(token_pool.layout, "facts").key_id == keys.key_id
    assert SECRET not in repr(options)
    monkeypatch.setenv("KVSTORE_PAGE_KEY", "5a")
    with pytest.raises(ConfigError, match="page_key does not hold 64 hex digits"):
        read_options({"model": "m"}).identity.namespace(token_pool.layout, "facts")


def test_secret_in_an_engines_arguments_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"page_key is a secret, and everybody .* set KVSTORE_PAGE_KEY"
    ) as refused:
        read_options({"model": "m", "page_key": SECRET})
    assert SECRET not in str(refused.value)
    assert (
        Identity(model="m", page_key=SECRET).key_id == Identity(model="n", page_key=SECRET).key_id
    )
