"""A real model's KV through a real node: restored logits are equal bit by bit.

A model or cache without plain full attention is refused by name.
"""

import copy
import inspect
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import traces_of_calls
from comparison import ROUNDING
from lazily import adapters, transformers
from tiny_random import made

from gpu_agent.identity.transformers import weights_digest
from gpu_agent.options import AgentConfig
from kvstore import Client, ClientConfig, InvalidRequest, prefix_hashes, tracing
from kvstore.tools import local_node
from kvstore.tools.node_process import NodeProcess

WAIT_S = 60.0
# Long timeouts, since a busy machine answers late.
PATIENT = AgentConfig(lookup_timeout_s=30.0, load_timeout_s=60.0, save_timeout_s=60.0)
TOKENS = torch.tensor([[(7 * i) % 500 + 5 for i in range(100)]])
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def tiny_llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype).eval()


def tiny_mistral() -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=32)
    ).eval()


def test_address_local_begins_to_have_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bool] = []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(local_node, "keep", lambda: kept.append(True))
    for address in ("localhost:1", "local"):
        with (
            Client(ClientConfig(address=address)) as client,
            adapters.TransformersAdapter(client, tiny_llama(), "org/m"),
        ):
            assert kept == [True] * (address == "local")


def forward(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(
            tokens, **{adapters.cache_argument(model): cache}, use_cache=True
        ).logits
        return logits


@pytest.fixture(
    params=["shm", *(pytest.param(wire, marks=pytest.mark.long) for wire in ("bulk", "grpc"))]
)
def client(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Client]:
    """Connect over one wire: the adapter knows none, and test_agent.py has all of them."""
    config = ClientConfig(
        shared_node.address, wire=request.param, timeout_s=30.0, connect_timeout_s=20.0
    )
    with Client(config) as client:
        yield client


@pytest.fixture
def make(client: Client) -> Iterator["Maker"]:
    maker = Maker(client)
    yield maker
    for adapter in maker.adapters:
        adapter.close()
        assert adapter.check() == []


class Maker:
    """Make adapters with a model name that no other test uses."""

    def __init__(self, client: Client) -> None:
        self.client, self.name, self.adapters = client, f"tiny-{uuid.uuid4()}", []

    def __call__(self, model: Any, page_tokens: int = 16) -> Any:
        adapter = adapters.TransformersAdapter(
            self.client, model, self.name, page_tokens=page_tokens, config=PATIENT
        )
        self.adapters.append(adapter)
        return self.adapters[-1]


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral], ids=["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_restored_logits_and_tokens_are_equal(build: type, dtype: torch.dtype, make: Maker) -> None:
    model = build().to(dtype)
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS[:, :96], cache)
    saved = adapter.save(cache, TOKENS[:, :96]).done.result(WAIT_S)
    assert (saved.stored, saved.dropped) == (6, 0)
    expected = forward(model, TOKENS[:, 96:], cache)

    restored, count = adapter.load(TOKENS[0])
    assert count == 96
    assert torch.equal(forward(model, TOKENS[:, 96:], restored), expected)
    for ours, theirs in zip(restored.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys.view(torch.uint8), theirs.keys.view(torch.uint8))
        assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))


def test_calls_carry_the_callers_request_id(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    adapter, cache, traces = make(model), transformers.DynamicCache(), traces_of_calls(monkeypatch)
    forward(model, TOKENS, cache)
    with tracing.request("mine"):
        adapter.save(cache, TOKENS).done.result(WAIT_S)
    assert traces
    assert set(traces) == {tracing.named("mine")}
    del traces[:]
    assert adapter.load(TOKENS)[1] == 96
    (own,) = set(traces)
    assert own is not None
    assert len(traces) > 1, "expected a lookup and a load"


@pytest.mark.parametrize("plane", ["k", "v"])
def test_zeroed_page_changes_the_logits(client: Client, make: Maker, plane: str) -> None:
    """The comparison above can fail, since the model reads every restored page."""
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS[:, :96], cache)
    adapter.save(cache, TOKENS[:, :96]).done.result(WAIT_S)
    expected = forward(model, TOKENS[:, 96:], cache)

    layout = adapter.namespace.layout
    key = prefix_hashes(TOKENS[0], 16)[2]
    page = bytearray(layout.page_nbytes)
    assert client.get(adapter.namespace, [key], [page]) == [True]
    for piece in layout.slices:
        if piece.plane.name == plane:
            page[piece.offset : piece.offset + piece.nbytes] = bytes(piece.nbytes)
    client.remove(adapter.namespace, [key])
    client.put(adapter.namespace, [key], [page])

    restored, count = adapter.load(TOKENS)
    assert count == 96
    assert not torch.equal(forward(model, TOKENS[:, 96:], restored), expected)


def test_page_holds_the_caches_values_in_order(client: Client, make: Maker) -> None:
    """The order of a page's values is layer, plane, token, head, dimension."""
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS[:, :32], cache)
    adapter.save(cache, TOKENS[:, :32]).done.result(WAIT_S)
    page = torch.empty(adapter.namespace.layout.page_nbytes, dtype=torch.uint8)
    assert client.get(adapter.namespace, [prefix_hashes(TOKENS[0], 16)[1]], [page]) == [True]
    numbers = page.view(torch.float32).view(3, 2, 16, 2, 16)
    for layer in range(3):
        for plane, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            assert torch.equal(numbers[layer, plane], tensor[0, :, 16:32].transpose(0, 1))


def test_last_token_is_always_left_to_compute(make: Maker) -> None:
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS[:, :96], cache)
    adapter.save(cache, TOKENS[:, :96]).done.result(WAIT_S)
    restored, count = adapter.load(TOKENS[:, :96])
    assert count == restored.get_seq_length() == 95
    assert adapter.load(TOKENS[:, :80])[1] == 79
    assert adapter.load(TOKENS[:, :90])[1] == 80
    assert adapter.lookup(TOKENS[:, :90]) == 80


def test_save_of_a_part_of_the_caches_tokens(make: Maker) -> None:
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS, cache)
    assert adapter.save(cache, TOKENS[0, :40].tolist()).done.result(WAIT_S).stored == 2
    assert adapter.load(TOKENS)[1] == 32


def test_miss_returns_an_empty_cache(make: Maker) -> None:
    cache, count = make(tiny_llama()).load(TOKENS)
    assert count == cache.get_seq_length() == 0


def test_unreachable_node_is_a_miss() -> None:
    model = tiny_llama()
    config = ClientConfig(address="127.0.0.1:9", timeout_s=1.0, connect_timeout_s=0.2)
    with Client(config) as client, adapters.TransformersAdapter(client, model, "tiny") as adapter:
        assert adapter.load(TOKENS)[1] == 0
        cache = transformers.DynamicCache()
        forward(model, TOKENS, cache)
        assert adapter.save(cache, TOKENS).done.result(WAIT_S).dropped == 1


def test_other_weights_or_settings_never_hit(make: Maker) -> None:
    model = tiny_llama()
    cache = transformers.DynamicCache()
    forward(model, TOKENS, cache)
    make(model).save(cache, TOKENS).done.result(WAIT_S)
    assert make(tiny_llama()).lookup(TOKENS) == 96  # the same seed
    assert make(tiny_llama(seed=1)).lookup(TOKENS) == 0
    assert make(tiny_llama(torch.bfloat16)).lookup(TOKENS) == 0
    assert make(tiny_llama(), page_tokens=32).lookup(TOKENS) == 0
    turned = tiny_llama()
    turned.config.rope_parameters = {**turned.config.rope_parameters, "rope_theta": 5000.0}
    assert make(turned).lookup(TOKENS) == 0


def test_one_changed_weight_changes_the_digest() -> None:
    model = tiny_llama()
    before = weights_digest(model)
    assert weights_digest(tiny_llama()) == before
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert weights_digest(model) != before


def test_sliding_window_cache_is_refused_by_name(make: Maker) -> None:
    """Its layers keep only the last 31 of 100 tokens."""
    model = tiny_mistral()
    adapter = make(model)
    cache = transformers.DynamicCache(config=model.config)
    forward(model, TOKENS, cache)
    with pytest.raises(
        InvalidRequest,
        match="layer 0 of the cache is a DynamicSlidingWindowLayer.*with "
        f"{adapters.cache_argument(model)}=",
    ):
        adapter.save(cache, TOKENS)


HYBRID = {**SIZES, "num_hidden_layers": 2}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
RECURRENT = {
    # A gated delta net beside attention, Mamba-2 and attention in one layer, and a state that
    # transformers keeps outside its cache
    "layer 1 of Qwen3_5ForCausalLM caches with LinearAttentionLayer;": lambda: (
        transformers.Qwen3_5TextConfig(**HYBRID, layer_types=["full_attention", "linear_attention"])
    ),
    "layer 0 of FalconH1ForCausalLM caches with LinearAttentionAndFullAttentionLayer;": lambda: (
        transformers.FalconH1Config(**HYBRID, **MAMBA)
    ),
    "RwkvForCausalLM keeps a recurrent state": lambda: transformers.RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1
    ),
}


@pytest.mark.parametrize("message", RECURRENT)
def test_recurrent_model_is_refused_by_name(message: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(RECURRENT[message]())
    with pytest.raises(InvalidRequest, match=message):
        adapters.namespace_of(model, "hybrid", "r1")


def test_cache_without_the_tokens_is_refused(make: Maker) -> None:
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS[:, :48], cache)
    with pytest.raises(
        InvalidRequest, match="the cache holds 48 tokens, fewer than the 100 to save"
    ):
        adapter.save(cache, TOKENS)
    with pytest.raises(InvalidRequest, match=r"tokens have shape \[2, 100\]"):
        adapter.save(cache, TOKENS.repeat(2, 1))
    pair = transformers.DynamicCache()
    forward(model, TOKENS.repeat(2, 1), pair)
    with pytest.raises(InvalidRequest, match="a batch of 2 prompts"):
        adapter.save(pair, TOKENS)
    empty = transformers.DynamicCache(config=model.config)
    with pytest.raises(InvalidRequest, match="layer 0 of the cache is empty"):
        adapter.save(empty, TOKENS)


def test_cache_of_another_dtype_is_refused(make: Maker) -> None:
    """A cache may have been converted to save memory."""
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS, cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(torch.bfloat16), layer.values.to(torch.bfloat16)
    with pytest.raises(InvalidRequest, match=r"float32"):
        adapter.save(cache, TOKENS)


def test_layers_of_another_model_are_refused(make: Maker) -> None:
    """A cache may also hold the layers of a draft model."""
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS, cache)
    cache.update(cache.layers[0].keys, cache.layers[0].values, 3)
    with pytest.raises(InvalidRequest, match="attention"):
        adapter.save(cache, TOKENS)


def test_lora_added_later_makes_calls_raise(make: Maker) -> None:
    """The namespace does not cover a LoRA, which can be switched on and off."""
    model = tiny_llama()
    adapter = make(model)
    cache = transformers.DynamicCache()
    forward(model, TOKENS, cache)
    model._hf_peft_config_loaded = True
    for call in (
        lambda: adapter.save(cache, TOKENS),
        lambda: adapter.load(TOKENS),
        lambda: adapter.lookup(TOKENS),
    ):
        with pytest.raises(InvalidRequest, match="merge"):
            call()


def test_cache_argument_is_that_of_the_model() -> None:
    class New:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Old:
        def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

    assert [adapters.cache_argument(New()), adapters.cache_argument(Old())] == [
        "cache",
        "past_key_values",
    ]
    model = tiny_llama()
    forward(model, TOKENS, transformers.DynamicCache())  # a deprecation warning is an error here
    assert adapters.cache_argument(model) in inspect.signature(model.forward).parameters


# ---- the tiny hybrid of tests/conformance, which vLLM runs on a GPU only ----


@torch.no_grad()
def test_wrong_blocks_and_states_show_in_the_answers_of_the_tiny_hybrid() -> None:
    """So the suite's case `sensitivity` can pass: none of them is lost in the rounding."""
    block, end, answer = 64, 9, 8  # tokens: of a block, of a prompt after four blocks, of an answer
    model = made("gated-delta", "bfloat16").eval()
    torch.manual_seed(1)
    tokens = torch.randint(5, 505, (2, 4 * block + end + answer))

    def likely(cache: Any) -> torch.Tensor:
        logits = forward(model, tokens[:, 4 * block :], cache)[:, -answer:]
        return torch.log_softmax(logits.float(), -1)

    earlier = transformers.DynamicCache(config=model.config)
    forward(model, tokens[:, : 3 * block], earlier)
    whole = copy.deepcopy(earlier)
    forward(model, tokens[:, 3 * block : 4 * block], whole)
    right = likely(copy.deepcopy(whole))
    for tamper in (zero_a_block, repeat_a_block, swap_layers, take_earlier_states):
        cache = copy.deepcopy(whole)
        tamper(cache, earlier, block)
        changes = (likely(cache) - right).gather(-1, right.argmax(-1, keepdim=True)).abs()
        assert min(changes.amax((1, 2))) > ROUNDING["bfloat16"], (tamper.__name__, changes)


def zero_a_block(cache: Any, earlier: Any, block: int) -> None:
    for cells in cells_of(cache):
        cells[:, :, -block:] = 0


def repeat_a_block(cache: Any, earlier: Any, block: int) -> None:
    for cells in cells_of(cache):
        cells[:, :, -block:] = cells[:, :, -2 * block : -block].clone()


def swap_layers(cache: Any, earlier: Any, block: int) -> None:
    one, other = (layer for layer in cache.layers if hasattr(layer, "keys"))
    one.keys, one.values, other.keys, other.values = other.keys, other.values, one.keys, one.values


def take_earlier_states(cache: Any, earlier: Any, block: int) -> None:
    for late, early in zip(cache.layers, earlier.layers, strict=True):
        if hasattr(late, "recurrent_states"):
            late.recurrent_states, late.conv_states = early.recurrent_states, early.conv_states


def cells_of(cache: Any) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            yield from (layer.keys, layer.values)
