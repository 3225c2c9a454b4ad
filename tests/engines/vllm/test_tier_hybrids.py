"""The tier with recurrent state (Mamba, gated delta net) beside attention, in vLLM's scheduler.

The worker is a recurrent model. Its state after n tokens depends on all of them, and lives in the
block that vLLM's own worker uses: that of the step's last token, and a checkpoint at the last hash
boundary of a prompt where the backend exports one. Each step reads the state of the step before
from its block. A state of another length or prompt, or one that was overwritten, fails there.
"""

import hashlib
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import Client, ClientConfig, ConfigError
from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import Engine, model_directory, prompt
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
    from vllm.v1 import kv_cache_interface as specs
    from vllm.v1.request import RequestStatus

    from gpu_agent.engines import vllm_tier
    from gpu_agent.engines.vllm_identity import STATES_SERVED

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not STATES_SERVED, reason="the tier refuses recurrent state of this vLLM"),
]
PATIENT: dict[str, Any] = {
    "lookup_timeout_s": 20.0,
    "load_timeout_s": 20.0,
    "timeout_s": 30.0,
    "connect_timeout_s": 30.0,
    "backoff_s_max": 0.2,
}
NUMBERS = 16  # of a cell: as many bytes name a prefix


def groups(block: int, checkpoints: bool = False, states: int = 1) -> list[Any]:
    """Return a group of attention layers and one or more of recurrent layers."""
    full = specs.FullAttentionSpec(
        block_size=block, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    state = specs.MambaSpec(
        block_size=block,
        shapes=((4, 32), (16, 16)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=int(checkpoints),
        prefill_checkpoint_alignment=1 if checkpoints else None,
    )
    kinds = [full, *[state] * states]
    return [specs.KVCacheGroupSpec([f"layers.{n}"], kind) for n, kind in enumerate(kinds)]


UNITS = {"block_size": 64, "prefix_match_unit": 16}
# Blocks of 16 tokens, each hashed; of 64, hashed in units of 16, so that a hit may end inside a
# block; and of 64 with a backend that exports a state before the end of a step.
SHAPES: dict[str, dict[str, Any]] = {
    "blocks": {"groups": groups(16)},
    "two groups": {"groups": groups(16, states=2)},
    "units": {"groups": groups(64), "cache": UNITS},
    "checkpoints": {"groups": groups(64, checkpoints=True), "cache": {"block_size": 64}},
    "chunks of two blocks": {"groups": groups(16), "extra": {"blocks_per_chunk": 2}},
}


class HybridEngine(Engine):
    """An engine of a hybrid model; memory that was never written holds no state of any prefix."""

    def __init__(self, model: str, options: dict[str, Any], **arguments: Any) -> None:
        cache = {"mamba_cache_mode": "align", **arguments.pop("cache", {})}
        self.kinds = [group.kv_cache_spec for group in arguments["groups"]]
        super().__init__(model, options, cache=cache, **arguments)
        self.gpu.fill_(0xEE)
        assert self.rows is not None
        self.rows.fill_(0xDD)
        self._prefixes: dict[str, list[bytes]] = {}

    def prefix(self, request: Any, tokens: int) -> bytes:
        """Return the name of a request's first tokens, which all of them decide."""
        names = self._prefixes.setdefault(request.request_id, [b""])
        for token in request.all_token_ids[len(names) - 1 : tokens]:
            salted = names[-1] + token.to_bytes(4, "big")
            names.append(hashlib.blake2b(salted, digest_size=NUMBERS).digest())
        return names[tokens]

    def filled(self, name: bytes, group: int, nbytes: int) -> torch.Tensor:
        cell = bytes(byte ^ (group * 37) for byte in name)
        return torch.frombuffer(bytearray(cell * (nbytes // NUMBERS)), dtype=torch.uint8)

    def _compute(self, request: Any, count: int) -> None:
        end = request.num_computed_tokens  # schedule() has added this step's tokens
        done = end - count
        self.computed.setdefault(request.request_id, done)
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, (table, kind) in enumerate(zip(tables, self.kinds, strict=True)):
            if isinstance(kind, specs.MambaSpec):
                self._recur(request, group, table, kind, done, end)
            else:
                self._attend(request, group, table, kind.block_size, done, end)

    def _attend(
        self, request: Any, group: int, table: list[int], size: int, done: int, end: int
    ) -> None:
        cell = self.gpu.shape[1] // size
        for position in range(end):
            row = self.gpu[table[position // size]]
            part = row[position % size * cell : (position % size + 1) * cell]
            right = self.filled(self.prefix(request, position + 1), group, cell)
            if position >= done:
                part.copy_(right)
            else:
                assert torch.equal(part, right), f"token {position} of group {group} is wrong"

    def _recur(
        self, request: Any, group: int, table: list[int], kind: Any, done: int, end: int
    ) -> None:
        nbytes, size = self.gpu.shape[1], kind.block_size
        if done:
            block = table[(done - 1) // size]
            assert block, f"group {group} has no state after {done} tokens"
            right = self.filled(self.prefix(request, done), group, nbytes)
            assert torch.equal(self.gpu[block], right), f"the state after {done} tokens is wrong"
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            *([end], [end - done], self.hash_tokens, size, kind.prefill_checkpoint_alignment),
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self.alignment,
        )
        if offset and table[column]:
            name = self.prefix(request, done + offset)
            self.gpu[table[column]] = self.filled(name, group, nbytes)
        block = table[(end - 1) // size]
        self.gpu[block] = self.filled(self.prefix(request, end), group, nbytes)

    @property
    def alignment(self) -> int:
        return int(self.scheduler.kv_cache_config.cache_hit_alignment_tokens)


Start = Callable[..., HybridEngine]


@pytest.fixture
def start(tmp_path: Path, scheduler_node: NodeProcess) -> Iterator[Start]:
    """Return a function that makes engines of one hybrid model and of a tenant of their own."""
    engines = []
    store = {"address": scheduler_node.address, "tenant": uuid.uuid4().hex, **PATIENT}

    def make(shape: str = "blocks", **arguments: Any) -> HybridEngine:
        options = {**store, **arguments.pop("options", {})}
        model = model_directory(tmp_path / "tiny")
        engines.append(HybridEngine(model, options, **{**SHAPES[shape], **arguments}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [127, 128, 129, 200])
def test_states_are_restored_at_and_beside_boundaries(
    start: Start, shape: str, length: int
) -> None:
    """At an exact boundary the last token is computed again, from the state before it."""
    first, second = start(shape), start(shape)
    assert first.serve("cold", prompt(length)) == 0
    restored = second.serve("warm", prompt(length))
    assert restored < length
    if shape == "blocks":
        assert restored == (length - 1) // 16 * 16
    # vLLM keeps one state of a step, which may be inside a chunk of two blocks.
    assert restored > 0 or shape == "chunks of two blocks"


@pytest.mark.parametrize("shape", SHAPES)
def test_shared_prefix_ends_at_a_stored_state(start: Start, shape: str) -> None:
    first, second = start(shape), start(shape)
    first.serve("cold", prompt(200))
    assert second.serve("shorter", prompt(150)) <= 144
    assert second.serve("other end", prompt(130) + prompt(90, 11)) <= 130
    assert second.serve("other", prompt(200, 13)) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_states_of_chunked_prefill_and_of_answers_are_restored(start: Start, shape: str) -> None:
    extra = {**SHAPES[shape].get("extra", {}), "offload_prompt_only": False}
    first, second = (start(shape, batch_tokens=72, extra=extra) for _ in range(2))
    request = first.submit("cold", prompt(130), max_tokens=100)
    first.run()
    known = list(request.all_token_ids)
    assert len(known) == 230
    assert second.serve("next turn", known + prompt(20, 3)) > 130


def test_preempted_request_continues_from_the_right_state(start: Start) -> None:
    first, second = (start(gpu_blocks=40, extra={"offload_prompt_only": False}) for _ in range(2))
    first.serve("cold", prompt(150))
    for engine in (second, first):
        engine.submit("r", prompt(150), max_tokens=60)
        for _ in range(6):
            while not engine.scheduler.running:
                engine.step()
                time.sleep(0.001)
            for _ in range(3):
                engine.step()
            if engine.scheduler.running:
                victim = engine.scheduler.running.pop()
                engine.scheduler._preempt_request(victim, 0.0)
        engine.run()


def test_aborted_request_leaves_no_wrong_state(start: Start) -> None:
    first, second = start(batch_tokens=48), start()
    for steps in range(1, 5):
        name, tokens = f"r{steps}", prompt(200, 2 * steps + 1)
        first.submit(name, tokens)
        request = first.scheduler.requests[name]
        while request.num_computed_tokens < 48 * steps - 24:
            first.step()
        first.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        first.run()
        second.serve(name, tokens)
    assert max(second.computed.values()) > 0


def test_state_without_its_attention_pages_is_not_loaded(
    start: Start, scheduler_node: NodeProcess
) -> None:
    """And the reverse: a hit ends where every group has its page."""
    first = start(batch_tokens=64)  # it keeps the states after 64, 128 and 192 tokens
    request = first.submit("cold", prompt(200))
    first.run()
    with Client(ClientConfig(address=scheduler_node.address)) as client:
        for group, gone, left in ((1, 11, 128), (0, 5, 64)):
            key = request.block_hashes[gone] + group.to_bytes(4, "big")
            assert client.remove(first.tier.namespace, [key]) == [True]
            engine = start()
            assert engine.serve(f"without {group}", prompt(200)) == left
            engine.close()


def test_swapped_states_are_noticed(start: Start, scheduler_node: NodeProcess) -> None:
    """The test of these tests: a state in the place of another one fails."""
    first, second = start(), start()
    requests = [first.submit(f"r{seed}", prompt(200, seed)) for seed in (3, 7)]
    first.run()
    keys = [request.block_hashes[11] + (1).to_bytes(4, "big") for request in requests]
    space = first.tier.namespace
    with Client(ClientConfig(address=scheduler_node.address)) as client:
        pages = [bytearray(space.layout.page_nbytes) for _ in keys]
        client.get(space, keys, pages)
        assert pages[0] != pages[1]
        client.remove(space, keys)
        client.put(space, keys, pages[::-1])
    with pytest.raises(AssertionError, match="the state after 192 tokens is wrong"):
        second.serve("warm", prompt(200, 3))


def test_states_of_another_dtype_and_the_same_size_have_another_namespace(start: Start) -> None:
    found = set()
    for dtype in (torch.float16, torch.bfloat16):
        made = groups(16)
        made[1].kv_cache_spec = replace(made[1].kv_cache_spec, dtypes=(dtype, dtype))
        found.add(start(groups=made).tier.namespace.digest)
    assert len(found) == 2


def test_exported_states_with_hits_inside_blocks_are_refused(start: Start) -> None:
    """vLLM 0.33 keeps the state of such a hit under the key of the block's end."""
    with pytest.raises(ConfigError, match=r"hits inside blocks.*prefix_match_unit"):
        start(groups=groups(64, checkpoints=True), cache=UNITS)


def test_vllm_caches_a_wrong_state_after_a_hit_inside_a_block(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the refusal. If this fails, vLLM has changed, and it may be lifted."""
    monkeypatch.setattr(vllm_tier, "check_tier_groups", lambda *_: None)
    engine = start(groups=groups(64, checkpoints=True), cache=UNITS)
    engine.serve("cold", prompt(97))
    assert engine.serve("longer", prompt(97) + prompt(108, 11)) == 96
    with pytest.raises(AssertionError, match="the state after 128 tokens is wrong"):
        engine.serve("same head", prompt(97) + prompt(60, 11))


@pytest.mark.parametrize("shape", SHAPES)
def test_storm_of_requests_restores_only_right_states(
    start: Start, scheduler_node: NodeProcess, seed: int, shape: str
) -> None:
    rng = random.Random(seed)
    extra = {**SHAPES[shape].get("extra", {}), "offload_prompt_only": False}
    blocks = 60 if "block_size" not in SHAPES[shape].get("cache", {}) else 24
    engines = [
        start(
            shape, batch_tokens=rng.choice((72, 512)), gpu_blocks=blocks, cpu_chunks=24, extra=extra
        )
        for _ in range(2)
    ]
    live: list[tuple[HybridEngine, str]] = []

    def loaded() -> bool:
        return any(engine.tier._agent.stats.pages_loaded for engine in engines)

    with Client(ClientConfig(address=scheduler_node.address)) as client:
        for number in range(400):
            if number >= 40 and loaded():  # with some seeds the first ones find all in host memory
                break
            engine = rng.choice(engines)
            head = prompt(rng.choice((48, 64, 100, 128)), rng.choice((3, 7)))
            tokens = head + prompt(rng.randrange(1, 90), rng.choice((11, 13)))
            engine.submit(f"r{number}", tokens, max_tokens=rng.randrange(1, 40))
            live.append((engine, f"r{number}"))
            for _ in range(rng.randrange(25)):
                rng.choice(engines).step()
                time.sleep(rng.choice((0, 0, 0.002)))
            what = rng.random()
            if what < 0.2:
                keys = [
                    page.prefix_hash for page in client.list_pages(engine.tier.namespace, limit=100)
                ]
                client.remove(
                    engine.tier.namespace, rng.sample(keys, len(keys) // 3) or [bytes(36)]
                )
            elif what < 0.35:
                one, name = rng.choice(live)
                one.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            elif what < 0.5 and engine.scheduler.running:
                engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
            elif what < 0.6:
                engine.scheduler.kv_cache_manager.reset_prefix_cache()
        for engine in engines:
            engine.run(120)
    assert loaded()
