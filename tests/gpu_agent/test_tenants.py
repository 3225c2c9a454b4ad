"""Every adapter and a client program work with only a tenant's token configured."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gated import TENANT, Gated
from lazily import IS_PAGED, UNPAGED, adapters, batching_config, paged_adapters, transformers
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, hashes
from waiting import wait_until

from gpu_agent import Agent, KVPool
from gpu_agent.engines.lightllm import PyLocalCacheService
from gpu_agent.options import identity_of, read_options
from kvstore import (
    Client,
    ClientConfig,
    ConfigError,
    Forbidden,
    Namespace,
    client_config,
    opaque_layout,
)
from kvstore.security.identities import new_token

ENGINES = Path(__file__).parents[2] / "gpu_agent" / "engines"
KEY = b"k" * 32
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    """Start a node, with its address and a token of TENANT in the environment, as for an engine."""
    gated = Gated(tmp_path)
    monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{gated.node.grpc.port}")
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(gated.file(gated.token("engines"))))
    for name, seconds in {"TIMEOUT": "20", "CONNECT_TIMEOUT": "10"}.items():
        monkeypatch.setenv(f"KVSTORE_{name}_S", seconds)
    for name in ("LOOKUP", "LOAD", "SAVE"):
        monkeypatch.setenv(f"KVSTORE_AGENT_{name}_TIMEOUT_S", "10")
    yield gated
    assert gated.node.check() == []
    gated.node.stop()


@pytest.fixture
def client(gated: Gated) -> Iterator[Client]:
    with Client() as client:
        yield client


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def test_client_with_a_tenants_token_stores_and_loads(client: Client) -> None:
    namespace = Namespace("m", opaque_layout(4096), tenant=client.tenant)
    client.put(namespace, [KEY], [bytes(4096)])
    assert client.tenant == TENANT
    assert client.get(namespace, [KEY], [bytearray(4096)]) == [True]


def test_transformers_adapter_with_a_tenants_token_stores_and_loads(client: Client) -> None:
    model, ids = tiny_llama(), [(7 * i) % 500 for i in range(65)]
    cache = transformers.DynamicCache()
    for layer in range(SIZES["num_hidden_layers"]):
        cache.update(torch.rand(1, 2, 65, 16), torch.rand(1, 2, 65, 16), layer)
    with adapters.TransformersAdapter(client, model, "m", "r", page_tokens=16) as adapter:
        assert adapter.namespace.tenant == TENANT
        assert adapter.save(cache, ids).done.result(WAIT_S).stored == 4
        assert adapter.load(ids)[1] == 64


@pytest.mark.skipif(
    not IS_PAGED,
    reason=UNPAGED,
)
def test_paged_adapter_with_a_tenants_token_stores_and_loads(client: Client) -> None:
    model, ids = tiny_llama(), [(7 * i) % 500 for i in range(49)]
    batching = batching_config(page_size=16, num_blocks=32, max_batch_tokens=64)
    generation = transformers.GenerationConfig(
        max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.start()
    try:
        with paged_adapters.PagedAdapter(client, manager, "m", "r") as adapter:
            assert adapter.namespace.tenant == TENANT
            request = manager.add_request(ids)
            wait_until(lambda: manager.get_result(request, timeout=0.05))
            saved = adapter.save(ids)
            assert (saved.stored, saved.dropped) == (3, 0)
            assert adapter.load(ids) == 48
    finally:
        manager.stop(block=True)


def test_lightllms_service_with_a_tenants_token_stores_and_loads(
    gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2})
    )
    arguments = {
        "model_dir": str(tmp_path),
        "cpu_cache_token_page_size": 64,
        "enable_multimodal": False,
    }
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments))
    monkeypatch.setenv("KVSTORE_REVISION", "r")
    service = PyLocalCacheService(torch.zeros((4, 4096), dtype=torch.uint8))
    try:
        assert service.namespace.tenant == TENANT
        task = service.create([1, 2], torch.tensor([0, 1], dtype=torch.int32), "w")
        wait_until(task.ready)
        assert service.query([1, 2, 3]) == [True, True, False]
    finally:
        service.close()


@pytest.mark.usefixtures("gated")
def test_options_of_the_other_adapters_with_a_tenants_token_store_and_load(
    token_pool: KVPool,
) -> None:
    """The adapters for vLLM, SGLang and LMCache make their namespaces of these options."""
    options = read_options({"model": "m"})
    with Client(options.client) as client:
        agent = Agent(
            client,
            options.identity.namespace(token_pool.layout, "facts"),
            token_pool,
            options.agent,
        )
        assert agent.namespace.tenant == TENANT
        assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == PAGES
        assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
        agent.close()


def test_adapters_take_their_tenant_from_tenant_of() -> None:
    """Adapters use `tenant_of` through options, an identity or the client.

    Regression: LightLLM's and transformers' adapters always used the default tenant.
    """
    sources = {"read_options", "identity_of", "client.tenant"}
    for path in ENGINES.glob("*.py"):
        tree = ast.parse(path.read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        named = called | {
            ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        }
        if "Client" in called or "client: Client" in path.read_text():
            assert named & sources, f"{path.name} opens namespaces without a tenant"
        assert not {"Identity", "Namespace"} & called, path.name


# ---- conflicting and missing tenants ------------------------------------------------------------


def test_tenant_that_differs_from_the_tokens_is_refused_with_both_names(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TENANT", "team-b")
    with Client() as other:
        assert (other.tenant, read_options({}).identity.tenant) == ("team-b", "team-b")
        with pytest.raises(
            Forbidden, match=f"belongs to tenant {TENANT}, the namespace to tenant 'team-b'"
        ) as refused:
            other.lookup(Namespace("m", opaque_layout(4096), tenant=other.tenant), [KEY])
    # Both remedies that it names work.
    assert f"set tenant (KVSTORE_TENANT) to {TENANT}, or leave it unset" in str(refused.value)
    monkeypatch.setenv("KVSTORE_TENANT", TENANT)
    with Client() as configured:
        assert (
            configured.lookup(
                Namespace("m", opaque_layout(4096), tenant=configured.tenant), [KEY]
            ).prefix_pages
            == 0
        )
    assert (
        client.lookup(Namespace("m", opaque_layout(4096), tenant=client.tenant), [KEY]).prefix_pages
        == 0
    )


def test_shared_models_are_read_by_naming_the_tenant(gated: Gated, client: Client) -> None:
    namespace = Namespace("prompts-1", opaque_layout(4096), tenant=client.tenant)
    client.put(namespace, [KEY], [bytes(4096)])
    reader = gated.token("reader", "read", tenant="team-b")
    with gated.path.open("a") as file:
        file.write(f"share {TENANT} models=prompts-* with=team-b\n")
    gated.taken_up(lambda: bool(gated.node.access.identities.shares))
    with Client(
        ClientConfig(client.config.address, timeout_s=20.0, token=reader, tenant=TENANT)
    ) as other:
        shared = Namespace("prompts-1", opaque_layout(4096), tenant=other.tenant)
        assert other.lookup(shared, [KEY]).prefix_pages == 1


def test_tenant_without_configuration_is_the_default() -> None:
    assert Client(ClientConfig("127.0.0.1:9")).tenant == identity_of({}).tenant == "default"
    assert Client(ClientConfig("127.0.0.1:9", token="x" * 43)).tenant == "default"


def lightllm_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text("{}")
    arguments = {
        "model_dir": str(folder),
        "cpu_cache_token_page_size": 64,
        "enable_multimodal": False,
    }
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments))
    PyLocalCacheService(torch.zeros((4, 4096), dtype=torch.uint8)).close()


def transformers_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Client(client_config()) as client,
        adapters.TransformersAdapter(client, tiny_llama(), "m", "r"),
    ):
        pass


def options_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_options({"model": "m"})


@pytest.mark.parametrize(
    "start", [options_start, lightllm_start, transformers_start], ids=lambda start: start.__name__
)
def test_missing_token_file_fails_the_start_unless_the_tenant_is_named(
    start: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the token the tenant of the namespaces is unknown.

    If the tenant is named, the file may come later.
    """
    monkeypatch.setenv("KVSTORE_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("KVSTORE_REVISION", "r")
    with pytest.raises(ConfigError, match=r"token_file=.*token can not be read"):
        start(tmp_path, monkeypatch)
    monkeypatch.setenv("KVSTORE_TENANT", TENANT)
    start(tmp_path, monkeypatch)
    (tmp_path / "token").write_text(new_token("team-b"))
    (tmp_path / "token").chmod(0o600)
    monkeypatch.delenv("KVSTORE_TENANT")
    start(tmp_path, monkeypatch)
