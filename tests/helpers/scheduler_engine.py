"""vLLM's scheduler and our connector without a model: a forward pass is arithmetic on the KV cache.

The KV of a token depends on the token and on the KV of all earlier tokens (or of those in a sliding
window), read through the block table, as in attention. Garbage in a block therefore spreads to all
later tokens, and every answer shows whether the whole prefix was right. Ranks are objects in one
process. vLLM's own classes do what surrounds a model runner: the order of calls and aggregation.
"""

import concurrent.futures
import json
import os
import pickle
import struct
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    # Pytest turns warnings into errors; ignore those of importing an engine
    warnings.simplefilter("ignore")
    import torch
    from scheduler_beside import orders_of, ours_of, transfer_config
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    import gpu_agent.engines.vllm as adapter

BLOCK = 16
HEADS, CELL = 2, 4
CELLS_NBYTES = HEADS * BLOCK * CELL * 4  # of a layer's block
CHECKPOINTS = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": BLOCK}
STATE_MODULUS = (1 << 61) - 1
# The context of a forward pass without attention
NOWHERE = SimpleNamespace(attn_metadata=None, no_compile_layers={})
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * i) % 500 + 5 for i in range(count)]


def answer(prompt: list[int], count: int) -> list[int]:
    """Return what an engine without a cache generates, the expected answer."""
    known = list(prompt)
    for _ in range(count):
        known.append(token_of(attend([], known, 0)[-1]))
    return known[len(prompt) :]


def attend(past: list[int], known: list[int], window: int) -> list[int]:
    """Return the values of `known`, which follow tokens with the values `past`."""
    values = past[-(window - 1) :] if window else list(past)
    before, seen = len(values), sum(values)
    for token in known:
        if window and len(values) >= window:
            seen -= values[-window]
        values.append((seen * 31 + token + 1) % 1_000_003)
        seen += values[-1]
    return values[before:]


def advance(state: int, known: list[int]) -> int:
    """Return the recurrent state after more tokens; a wrong state stays wrong for ever."""
    for token in known:
        state = (state * 31 + token + 1) % STATE_MODULUS
    return state


def token_of(value: int) -> int:
    return value % 500 + 5


class Rank:
    """One worker: its tensors and its connector."""

    def __init__(self, config: Any, caches: Any, rank: int, patch: Any) -> None:
        self.rank, self.caches = rank, caches
        group = type("Group", (), {"rank_in_group": rank})()
        first = type("Group", (), {"rank_in_group": 0})()
        patch.setattr(adapter, "get_tp_group", lambda: group)
        patch.setattr(adapter, "get_pp_group", lambda: first)
        patch.setattr(adapter, "prefill_context_rank", lambda: 0)
        self.outer: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, caches
        )
        self.connector = ours_of(self.outer)
        # As in vLLM, groups share the memory: a block belongs to one of them at a time
        self.memory = [
            torch.full((caches.num_blocks, CELLS_NBYTES), -1, dtype=torch.int8) for _ in range(2)
        ]
        self.kv = {
            name: self._view(memory, group.kv_cache_spec)
            for group in caches.kv_cache_groups
            for name, memory in zip(group.layer_names, self.memory, strict=True)
        }
        self.outer.register_kv_caches(self.kv)

        # Right states by layer and position, where rejected drafts left wrong ones
        self.rolled_back: dict[tuple[str, int], int] = {}
        self.hash_tokens = self.hit_tokens = BLOCK

    def _view(self, memory: torch.Tensor, spec: Any) -> torch.Tensor:
        """View memory as vLLM does, `[blocks, heads, tokens, cell]`; states are bytes."""
        if isinstance(spec, MambaSpec):
            nbytes = spec.state_content_size_bytes
            return memory[:, :nbytes].view(-1, 1, 1, nbytes)
        return memory.view(torch.int32).view(-1, HEADS, BLOCK, CELL)

    def prepare(self, output: Any) -> None:
        """Zero new blocks and copy blocks, as vLLM's workers do before a forward pass."""
        for memory in self.memory:
            for block in output.new_block_ids_to_zero or ():
                memory[block] = 0
            for copy in output.kv_cache_block_copies or ():
                memory[copy.dst_block_id] = memory[copy.src_block_id]

    def forward(
        self, group: int, table: list[int], start: int, known: list[int], drafts: list[int]
    ) -> int:
        """Compute the KV of `known[start:]` and return the last token's value.

        Returns 0 if the prefix in any layer is wrong. All drafts are rejected.
        """
        if isinstance(self.caches.kv_cache_groups[group].kv_cache_spec, MambaSpec):
            return self._forward_states(group, table, start, known, drafts)
        window = (
            getattr(self.caches.kv_cache_groups[group].kv_cache_spec, "sliding_window", None) or 0
        )
        first = max(0, start - window + 1) if window else 0
        found = set()
        for layer, name in enumerate(self.caches.kv_cache_groups[group].layer_names):
            view, mark = self.kv[name], 1 + layer + 10 * self.rank + 100 * group
            cells = [
                view[table[position // BLOCK], :, position % BLOCK]
                for position in range(first, len(known))
            ]
            assert all(table[position // BLOCK] for position in range(first, start)), (
                "the null block is read"
            )
            past = [
                int(cell[0, 0]) if int(cell[1, 3]) == mark else 999_983
                for cell in cells[: start - first]
            ]
            values = attend(past, known[start:], window)
            for cell, value in zip(cells[start - first :], values, strict=True):
                cell[:] = mark
                cell[0, 0] = value
            found.add(values[-1])
        return found.pop() if found == {attend([], known, window)[-1]} else 0

    def _forward_states(
        self, group: int, table: list[int], start: int, known: list[int], drafts: list[int]
    ) -> int:
        """Advance the states of a group; return 1 if they were right, else 0.

        Rejected drafts leave a wrong state in the block. The next step of the request rolls it
        back, as an engine does that keeps the right one elsewhere.
        """
        spec = self.caches.kv_cache_groups[group].kv_cache_spec
        right = 1
        for layer, name in enumerate(self.caches.kv_cache_groups[group].layer_names):
            mark = 1 + layer + 10 * self.rank + 100 * group
            cells = self.kv[name].view(-1, spec.state_content_size_bytes).view(torch.int64)
            state = 0
            if start:
                block = table[(start - 1) // spec.block_size]
                assert block, "the null block is read"
                state, found = cells[block].tolist()
                state = self.rolled_back.pop((name, start), state)
                right &= found == mark and state == advance(0, known[:start])
            end = len(known)
            for column, position in self._checkpoint(spec, start, end):
                at = advance(state, known[start:position])
                cells[table[column]] = torch.tensor([at, mark])
            state = advance(state, known[start:])
            block = table[(end - 1) // spec.block_size]
            assert block, "the null block is written"
            if drafts:
                self.rolled_back[name, end] = state
            cells[block] = torch.tensor([advance(state, drafts), mark])
        return right

    def _checkpoint(self, spec: Any, start: int, end: int) -> list[tuple[int, int]]:
        """Return the block and the position of a state that is stored within a chunk, if any."""
        if not spec.num_prefill_checkpoint_blocks:
            return []
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        sizes = (self.hash_tokens, spec.block_size, spec.prefill_checkpoint_alignment)
        offsets, columns = compute_mamba_prefill_checkpoints(
            [end], [end - start], *sizes, False, self.hit_tokens
        )
        return [(columns[0], start + offsets[0])] if columns[0] >= 0 else []


class Engine:
    """An engine of vLLM's scheduler with our connector.

    `store`: the connector's options. `window`: add a second cache group with a sliding window of so
    many tokens. `states`: add a group of recurrent states with blocks of so many tokens;
    `checkpoints`: chunks of prompts store one within; `attention`: there are other groups;
    `ring`: the spec of a group that no hit needs. `overlap`: schedule a step before the result of
    the previous one is processed. `roles`: `role` and `outer` of `transfer_config`.
    """

    def __init__(
        self,
        model: Path,
        patch: Any,
        store: dict[str, Any],
        ranks: int = 1,
        blocks: int = 64,
        window: int = 0,
        states: int = 0,
        checkpoints: bool = False,
        attention: bool = True,
        ring: Any = None,
        policy: str = "recompute",
        batch_tokens: int = 512,
        hash_algorithm: str = "sha256",
        events: bool = False,
        overlap: bool = False,
        prefix_caching: bool = True,
        beside: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None,
        **roles: str,
    ) -> None:
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        cache = CacheConfig(
            block_size=states or BLOCK,
            mamba_cache_mode="align" if states else "none",
            enable_prefix_caching=prefix_caching,
            prefix_caching_hash_algo=hash_algorithm,
        )
        cache.kv_cache_layout = "LBNHC"
        cache.num_gpu_blocks = blocks
        parallel = ParallelConfig()
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=cache,
            parallel_config=parallel,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_model_len=1024,
                max_num_seqs=8,
                max_num_batched_tokens=batch_tokens,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=overlap,
            ),
            kv_transfer_config=transfer_config(store, policy, beside, **roles),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            if events
            else None,
        )
        # Other connectors may support only one group of layers.
        hybrid = KVConnectorFactory.supports_hma_config(self.config.kv_transfer_config)
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
        parallel.tensor_parallel_size = parallel.world_size = ranks
        caches = _caches(blocks, window, states, checkpoints)
        if not attention:
            caches.kv_cache_groups = caches.kv_cache_groups[-1:]
        if ring:  # first, so that the numbers of the others are not those that we count
            caches.kv_cache_groups.insert(0, KVCacheGroupSpec(["ring.0", "ring.1"], ring))
        hasher = get_hash_fn_by_name(hash_algorithm)
        init_none_hash(hasher)
        step_tokens, hash_tokens = resolve_kv_cache_block_sizes(caches, self.config)
        self._block_hasher = get_request_block_hasher(hash_tokens, hasher)
        self.ranks = [Rank(self.config, caches, rank, patch) for rank in range(ranks)]
        self.scheduler = (AsyncScheduler if overlap else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=step_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        for rank in self.ranks if states else ():
            manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[-1]
            rank.hash_tokens, rank.hit_tokens = hash_tokens, manager.cache_hit_alignment_tokens
        self.outer: Any = self.scheduler.connector
        self.connector: Any = ours_of(self.outer)
        metadata = {
            (0, rank.rank): pickle.loads(pickle.dumps(rank.outer.get_handshake_metadata()))
            for rank in self.ranks
        }
        # As vLLM's worker and engine do it: ranks without metadata are left out.
        self.outer.set_xfer_handshake_metadata_pp_aware(
            {at: one for at, one in metadata.items() if one is not None}
        )
        self._aggregator = KVOutputAggregator(ranks)
        self.stats: Any = self.outer.build_kv_connector_stats()
        self.steps: list[dict[str, int]] = []  # tokens scheduled, per step
        self.requests: dict[str, Request] = {}
        self.answered: dict[str, Any] = {}  # the transfer parameters of each ended request
        self._overlap, self._attention = overlap, attention
        # Blocks are read within the step that orders it, instead of during later steps
        self.reads_at_once = False
        # With overlapping steps, workers know tokens before the scheduler does
        self._sampled: dict[str, list[int]] = {}
        # Steps whose results the scheduler has not processed
        self._running: deque[tuple[Any, Any]] = deque()
        self.cached: dict[str, int] = {}
        self.free_blocks = self.pool.get_num_free_blocks()
        # Called with the orders before the ranks execute them
        self.on_execute: Callable[[Any], None] = lambda orders: None

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    # ---- requests --------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Return what each request has generated so far."""
        return {name: list(request.output_token_ids) for name, request in self.requests.items()}

    def add(self, name: str, prompt: list[int], count: int = 8, **changes: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        transfer = changes.pop("kv_transfer_params", None)
        params.update_from_generation_config({}, 2)
        request = Request(name, prompt, params, None, block_hasher=self._block_hasher, **changes)
        request.kv_transfer_params = transfer
        self.requests[name] = request
        self._sampled[name] = []
        self.scheduler.add_request(request)
        return request

    def run(self, limit_s: float = 20.0, until: Callable[[], bool] | None = None) -> None:
        """Step until no request and no work of the store is left."""
        end = time.monotonic() + limit_s
        while self.scheduler.has_requests() and not (until and until()):
            assert time.monotonic() < end, "the engine does not finish"
            self.step()
        if until is None:  # blocks have been read, but may not be stored yet
            ranks = [rank.connector._rank for rank in self.ranks if rank.connector._rank]
            concurrent.futures.wait(
                [job.done for rank in ranks for _, job in rank._outcomes], limit_s
            )

    def generate(
        self, prompt: list[int], count: int = 8, name: str = "r", **changes: Any
    ) -> list[int]:
        self.add(name, prompt, count, **changes)
        self.run()
        return self.outputs[name]

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        for new in output.scheduled_new_reqs:
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        self._running.append((output, self.execute(output)))
        while len(self._running) > (self._overlap and bool(output.num_scheduled_tokens)):
            for results in self.scheduler.update_from_output(*self._running.popleft()).values():
                self.answered |= {
                    one.request_id: one.kv_transfer_params
                    for one in results.outputs
                    if one.finish_reason is not None
                }
        assert self.connector._scheduler is None or self.connector._scheduler.check() == []
        if not output.num_scheduled_tokens:
            time.sleep(0.001)
        return output

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Execute a step as vLLM's model runner and executor do."""
        self.on_execute(orders_of(output.kv_connector_metadata))
        results = [self._execute_rank(rank, output) for rank in self.ranks]
        for samples in zip(*(result.sampled_token_ids for result in results), strict=True):
            if any(sample != samples[0] for sample in samples):
                samples[0][:] = [1]  # as with an all-reduce, one wrong rank makes all wrong
        for name, sampled in zip(results[0].req_ids, results[0].sampled_token_ids, strict=True):
            self._sampled[name] += sampled
        merged = self._aggregator.aggregate(results)
        assert merged is not None
        for found in (
            merged.kv_connector_output.kv_connector_stats,
            self.outer.get_kv_connector_stats(),
        ):
            if found:
                self.stats.aggregate(found)
        return merged

    def _execute_rank(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        connector, found = rank.outer, KVConnectorOutput()
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        assert not output.has_sync_kv_loads or connector is not rank.connector, (
            "our connector loads within the step"
        )
        rank.prepare(output)
        sampled = self._forward(rank, output)
        connector.start_load_kv(NOWHERE)
        connector.wait_for_save()
        if self.reads_at_once:
            rank.connector._rank.drain()
        transfer = connector.get_transfer_results(output.finished_req_ids)
        found.finished_sending = transfer.finished_sending
        found.finished_recving = transfer.finished_recving
        found.failed_recving = transfer.failed_recving
        found.invalid_block_ids = connector.get_block_ids_with_load_errors()
        found.kv_connector_stats = connector.get_kv_connector_stats()
        found.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=found,
        )

    def _forward(self, rank: Rank, output: Any) -> dict[str, list[int]]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.requests[name], starts[name]
            known = (
                list(request.prompt_token_ids) + self._sampled[name]
                if self._overlap
                else list(request.all_token_ids)
            )
            done = start + count == len(known)
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            done |= bool(drafts)
            known = known[: start + count]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            values = [
                rank.forward(group, table, start, known, drafts)
                for group, table in enumerate(tables)
                if rank.caches.kv_cache_groups[group].kv_cache_spec.prefix_cacheable
            ]
            if not self._attention:
                values.insert(0, values[0] and attend([], known, 0)[-1])
            sampled[name] = [token_of(values[0]) if all(values) else 1] if done else []
        return sampled

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # ---- the store -------------------------------------------------------------------------

    def forget(self, keys: list[bytes], rank: int = 0, group: int = 0) -> None:
        """Remove pages of one rank and group from the store."""
        connector = self.ranks[rank].connector
        (space,) = connector._namespaces[group]
        assert all(connector._rank._backend._client.remove(space, keys))

    def forget_when_loading(self, page: int, rank: int = 0, group: int = 0) -> None:
        """Remove a page between the lookup that found it and the load, once."""

        def forget(orders: Any) -> None:
            if orders.loads:
                self.forget([orders.loads[0].parts[group].keys[page]], rank, group)
                self.on_execute = lambda orders: None

        self.on_execute = forget

    def close(self) -> None:
        for connector in [rank.outer for rank in self.ranks] + [self.outer]:
            connector.shutdown()


def _caches(blocks: int, window: int, states: int = 0, checkpoints: bool = False) -> KVCacheConfig:
    shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": 2, "dtype": torch.int32}
    groups = [
        KVCacheGroupSpec(["model.layers.0.attn", "model.layers.2.attn"], FullAttentionSpec(**shape))
    ]
    if window:
        spec = SlidingWindowSpec(**shape, sliding_window=window)
        groups.append(KVCacheGroupSpec(["model.layers.1.attn", "model.layers.3.attn"], spec))
    if states:
        spec = MambaSpec(
            block_size=states,
            shapes=((1,), (1,)),
            dtypes=(torch.int64, torch.int64),
            page_size_padded=CELLS_NBYTES,
            mamba_cache_mode="align",
            **CHECKPOINTS if checkpoints else {},
        )
        groups.append(KVCacheGroupSpec(["model.layers.4.mixer", "model.layers.5.mixer"], spec))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Engines:
    """A factory of the engines of one test, which share a tenant that no other test uses."""

    def __init__(self, directory: Path, patch: Any, address: str, tenant: str = "") -> None:
        self._directory, self._patch = directory, patch
        self.address = address
        self._tenant = tenant or uuid.uuid4().hex
        self._made: list[Engine] = []

    def __call__(
        self, store: dict[str, Any] | None = None, model: str = "model", **arguments: Any
    ) -> Engine:
        options = {
            "address": self.address,
            "tenant": self._tenant,
            "lookup_timeout_s": 10.0,
            "slow_hits": "take",
        }
        engine = Engine(self._directory / model, self._patch, options | (store or {}), **arguments)
        self._made.append(engine)
        return engine

    def save(self, prompt: list[int], count: int = 8, **arguments: Any) -> None:
        """Compute and store a prompt with a new engine."""
        engine = self(**arguments)
        assert engine.generate(prompt, count) == answer(prompt, count)
        assert engine.pool.get_num_free_blocks() == engine.free_blocks

    def close(self) -> None:
        for engine in self._made:
            engine.close()


def start_node(*flags: str) -> NodeProcess:
    """Start a node with the Python of the development environment."""
    return NodeProcess(
        *("--ram-bytes", "256MiB", "--extent-bytes", "16MiB", *flags),
        python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable),
    )
