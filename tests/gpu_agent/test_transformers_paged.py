"""The paged cache of continuous batching through a real node.

Another manager generates the same tokens from stored pages, its loop never sees a wrong block, and
no block leaks.
"""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lazily import IS_PAGED, UNPAGED, adapters, batching_config, paged_adapters, transformers

from gpu_agent.options import AgentConfig
from kvstore import Client, ClientConfig, InvalidRequest, prefix_hashes
from kvstore.tools.node_process import NodeProcess

if not IS_PAGED:
    pytest.skip(UNPAGED, allow_module_level=True)
PAGE = 16
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
# Long timeouts for most tests, since a busy machine answers late.
PATIENT = AgentConfig(
    lookup_timeout_s=30.0, load_timeout_s=60.0, save_timeout_s=60.0, staging_nbytes=1 << 20
)
HASTY = AgentConfig(
    lookup_timeout_s=1.0, load_timeout_s=1.0, save_timeout_s=1.0, staging_nbytes=1 << 20
)
CALL_S = 60.0  # the default deadline of a call
Make = Callable[..., "Engine"]


def prompt(count: int, seed: int = 7) -> list[int]:
    return [(seed * i) % 500 + 5 for i in range(count)]


def tiny_llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype).eval()


def start_manager(model: Any, **changes: Any) -> Any:
    config = batching_config(
        **{"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 256, **changes}
    )
    config.return_logprobs = True
    generation = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=config
    )
    manager.start()
    return manager


class Engine:
    """A manager of its own, as in another process, with an adapter."""

    def __init__(
        self, client: Client, name: str, model: Any, config: AgentConfig, **changes: Any
    ) -> None:
        self.model = model
        self.manager = start_manager(model, **changes)
        self.adapter = paged_adapters.PagedAdapter(client, self.manager, name, config=config)
        self.cache = self.manager.batch_processor.cache

    def generate(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        request = self.manager.add_request(tokens)
        end = time.monotonic() + 60
        while (
            result := self.manager.get_result(request, timeout=0.05)
        ) is None:  # may be another thread's result
            assert time.monotonic() < end
        assert result.error is None
        return result.generated_tokens, result.logprobs

    def generate_from_cache(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Generate the prompt twice and return the second result, which uses cached blocks like a
        hit.

        A prompt that is computed as a whole has other shapes and so rounds differently.
        """
        self.generate(tokens)
        return self.generate(tokens)

    def close(self) -> None:
        assert self.adapter.check() == []
        self.adapter.close()
        self.manager.stop(block=True)
        self.cache.evict_cached_blocks()
        assert self.cache.compute_free_capacity() > 0.99  # no block leaked


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    """Connect over one wire, since other tests cover the wires."""
    with Client(
        ClientConfig(address=shared_node.address, timeout_s=CALL_S, connect_timeout_s=20.0)
    ) as client:
        yield client


@pytest.fixture
def make(client: Client) -> Iterator[Make]:
    """Return a function that makes engines with a model name that no other test uses."""
    engines: list[Engine] = []
    name = f"tiny-{uuid.uuid4()}"

    def build(
        model: Any = None, client: Client = client, config: AgentConfig = PATIENT, **changes: Any
    ) -> Engine:
        engines.append(Engine(client, name, model or tiny_llama(), config, **changes))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_another_manager_generates_the_same_from_stored_pages(
    make: Make, dtype: torch.dtype
) -> None:
    first, second = make(tiny_llama(dtype)), make(tiny_llama(dtype))
    expected = first.generate_from_cache(prompt(100))
    assert first.adapter.save(prompt(100)).stored == 6
    assert second.adapter.load(prompt(100)) == 96
    assert second.generate(prompt(100)) == expected
    assert second.adapter.load(prompt(100)) == 96  # already there: nothing is loaded
    assert first.adapter.save(prompt(100)).existing == 6


def test_model_attends_to_the_loaded_pages(make: Make, client: Client) -> None:
    """The comparison above can fail: another page in the store changes the result."""
    first, second = make(), make()
    expected = first.generate_from_cache(prompt(100))
    first.adapter.save(prompt(100))
    space, key = first.adapter.namespace, prefix_hashes(prompt(100), PAGE)[2]
    client.remove(space, [key])
    client.put(space, [key], [bytes(space.layout.page_nbytes)])
    assert second.adapter.load(prompt(100)) == 96
    assert second.generate(prompt(100))[1] != expected[1]


def test_pages_are_shared_with_the_transformers_adapter(make: Make, client: Client) -> None:
    engine, model = make(), tiny_llama()
    with adapters.TransformersAdapter(
        client, model, engine.adapter.namespace.model, page_tokens=PAGE, config=PATIENT
    ) as plain:
        assert plain.namespace == engine.adapter.namespace
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model(
                torch.tensor([prompt(96)]),
                **{adapters.cache_argument(model): cache},
                use_cache=True,
            )
        plain.save(cache, prompt(96)).done.result(CALL_S)
        assert engine.adapter.load(prompt(100)) == 96

        longer = engine.generate(prompt(130, 11))
        engine.adapter.save(prompt(130, 11))
        restored, count = plain.load(prompt(130, 11))
        assert count == 128
        with torch.inference_mode():
            logits = model(
                torch.tensor([prompt(130, 11)[count:]]),
                **{adapters.cache_argument(model): restored},
            ).logits
        assert int(logits[0, -1].argmax()) == longer[0][0]


def test_generated_tokens_are_stored(make: Make) -> None:
    first, second = make(), make()
    answer, _ = first.generate(prompt(60))
    conversation = prompt(60) + answer[:5]  # the last token has no KV
    assert first.adapter.save(conversation).stored == 4
    assert second.adapter.load([*conversation, 9, 9]) == 64


def test_cached_blocks_are_not_loaded(make: Make) -> None:
    first, second = make(), make()
    expected = first.generate_from_cache(prompt(100))
    first.adapter.save(prompt(100))
    second.generate(prompt(40))
    assert second.adapter.load(prompt(100)) == 96
    assert second.adapter._agent.stats.pages_loaded == 4
    assert second.generate(prompt(100)) == expected


def test_chain_with_a_hole_loads_its_head(make: Make, client: Client) -> None:
    first, second = make(), make()
    expected = first.generate_from_cache(prompt(100))
    first.adapter.save(prompt(100))
    # Remove the page after the lookup, which would otherwise end the chain there.
    load, hole = second.adapter._agent.load, prefix_hashes(prompt(100), PAGE)[3]

    def late(*arguments: Any, **named: Any) -> Any:
        client.remove(first.adapter.namespace, [hole])
        return load(*arguments, **named)

    second.adapter._agent.load = late
    assert second.adapter.load(prompt(100)) == 48
    assert second.generate(prompt(100))[0] == expected[0]


def test_cache_without_room_stays_unchanged(make: Make) -> None:
    first, second = make(), make(num_blocks=4)
    first.generate(prompt(100))
    first.adapter.save(prompt(100))
    assert second.adapter.load(prompt(100)) == 0
    assert second.adapter.save(prompt(100)).dropped == 6
    assert second.generate(prompt(20, 3)) == first.generate(prompt(20, 3))


def test_concurrent_loads_and_saves_do_not_change_results(make: Make) -> None:
    first, second = make(num_blocks=256), make(num_blocks=256)
    seeds = [3, 7, 11, 13, 17, 19]
    expected = {seed: first.generate(prompt(90, seed))[0] for seed in seeds}
    for seed in seeds[::2]:
        first.adapter.save(prompt(90, seed))

    def serve(seed: int) -> list[int]:
        second.adapter.load(prompt(90, seed))
        tokens, _ = second.generate(prompt(90, seed))
        second.adapter.save(prompt(90, seed) + tokens[:-1])
        return tokens

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(serve, seeds * 3))
    assert found == [expected[seed] for seed in seeds * 3]


@pytest.mark.parametrize("what", ["load", "save"])
def test_interrupt_frees_blocks_after_the_last_copy(what: str, make: Make) -> None:
    """Regression: after Ctrl-C, blocks were freed while a thread of the agent still used them.

    It loaded into another prompt's blocks, or stored them under the first prompt's keys.
    """
    first, second = make(), make()
    first.generate(prompt(100))
    first.adapter.save(prompt(100))
    engine = second if what == "load" else first
    agent, tokens = engine.adapter._agent, prompt(100) if what == "load" else prompt(100, 8)
    if what == "save":
        engine.generate(tokens)
    moves, ended = {"load": "scatter", "save": "gather"}[what], []
    move = getattr(agent._transfer, moves)

    def slowly(*arguments: Any, **named: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(1.0)
        moved = move(*arguments, **named)
        ended.append(moves)
        return moved

    setattr(agent._transfer, moves, slowly)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(engine.adapter, what)(tokens)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended == [moves], "the copy was not awaited after the interrupt"
    assert engine.adapter.check() == []


def test_hung_or_killed_node_is_a_miss(make: Make) -> None:
    with NodeProcess("--ram-bytes", "64MiB", "--extent-bytes", "16MiB") as node:
        config = ClientConfig(address=node.address, backoff_s_max=0.1, timeout_s=CALL_S)
        with Client(config) as mine:
            engine = make(client=mine, config=HASTY)
            expected = engine.generate(prompt(100))
            os.kill(node.pid, signal.SIGSTOP)
            began = time.monotonic()
            assert engine.adapter.load(prompt(100)) == 0
            assert time.monotonic() - began < CALL_S / 2, "a call had no deadline of its own"
            os.kill(node.pid, signal.SIGCONT)
            node.kill()
            saved = engine.adapter.save(prompt(100))
            assert saved.dropped == 6
            assert saved.reason
            assert engine.adapter.check() == []
            assert engine.generate(prompt(100))[0] == expected[0]


def test_unsupported_managers_are_refused(client: Client) -> None:
    torch.manual_seed(0)
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=32)
    ).eval()
    for model, changes, message in (
        (sliding, {}, "layers of sliding_attention"),
        (tiny_llama(), {"allow_block_sharing": False}, "allow_block_sharing=True"),
    ):
        manager = start_manager(model, **changes)
        with pytest.raises(InvalidRequest, match=message):
            paged_adapters.PagedAdapter(client, manager, "tiny")
        manager.stop(block=True)
    with pytest.raises(InvalidRequest, match="does not run"):
        paged_adapters.PagedAdapter(client, manager, "tiny")


def test_cache_of_another_dtype_is_refused(make: Make) -> None:
    from gpu_agent.engines.transformers_paged import _pool

    adapter = make().adapter
    with pytest.raises(InvalidRequest, match="bfloat16"):
        _pool(
            adapters.namespace_of(tiny_llama(torch.bfloat16), "tiny", "r1", PAGE).layout,
            adapter._blocks,
        )


def test_layers_of_another_model_are_refused(make: Make) -> None:
    from gpu_agent.engines.transformers_paged import _pool

    adapter = make().adapter
    torch.manual_seed(0)
    shallow = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
    )
    layout = adapters.namespace_of(shallow, "tiny", "r1", PAGE).layout
    with pytest.raises(InvalidRequest, match="attention"):
        _pool(layout, adapter._blocks)


def test_lora_added_later_makes_calls_raise(make: Make) -> None:
    engine = make()
    engine.model._hf_peft_config_loaded = True
    for call in (engine.adapter.save, engine.adapter.load):
        with pytest.raises(InvalidRequest, match="merge"):
            call(prompt(100))
