"""vLLM's scheduler with its OffloadingConnector and our tier, and a fake worker.

    schedule -> ["GPU" -> CPU rows, of the step before] -> [CPU rows -> "GPU"] -> [new blocks get
    their bytes] -> output

The bytes of a block are derived from its hash. Before a request is computed, all its full blocks
that are not computed must hold their bytes, so a wrong or missing restored row is detected.
"""

import json
import struct
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
MODULE = "gpu_agent.engines.vllm_tier"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


def model_directory(path: Path, **changes: Any) -> str:
    """Create a checkpoint without tensors, which is enough for a scheduler; return its path."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (path / "config.json").write_text(json.dumps({**_CONFIG, **changes}))
    return str(path)


class Engine:
    """A scheduler with our tier and a fake worker.

    `options`: of the tier. `window`: half of the layers have a sliding window of so many tokens.
    `groups`: KV cache groups to use instead. `batch_tokens`: of a step. `cache`: fields of vLLM's
    CacheConfig. `extra`: options of the connector. `events`: vLLM publishes KV events.
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        connector: str | None = None,
        window: int | None = None,
        cpu_chunks: int = 256,
        gpu_blocks: int = 64,
        groups: list[KVCacheGroupSpec] | None = None,
        batch_tokens: int = 512,
        cache: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        events: bool = False,
    ) -> None:
        groups = groups or _groups(window)
        row_nbytes = sum(groups[0].kv_cache_spec.page_size_bytes for _ in groups[0].layer_names)
        self._chunk_blocks = int((extra or {}).get("blocks_per_chunk", 1))
        tier = {"type": "KVStoreTier", "module_path": MODULE, **options}
        extra = {
            **(extra or {}),
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": cpu_chunks * row_nbytes * self._chunk_blocks,
            "secondary_tiers": [tier],
        }
        ours = {"kv_connector": "KVStoreOffloadingConnector", "kv_connector_module_path": MODULE}
        transfer = KVTransferConfig(
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
            **({"kv_connector": connector} if connector else ours),
        )
        self.config = _vllm_config(model, transfer, gpu_blocks, batch_tokens, cache or {})
        if events:
            self.config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        self._hash = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(self._hash)
        caches = _kv_cache_config(groups, gpu_blocks)
        step_tokens, self.hash_tokens = resolve_kv_cache_block_sizes(caches, self.config)
        caches.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            caches, self.config, step_tokens, self.hash_tokens
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=step_tokens,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.manager = self.scheduler.connector.connector_scheduler.manager
        self.tier = self.manager.secondary_tiers[0]
        memory = self.manager.primary_tier.get_kv_memoryview()
        self.rows: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8).view(
            -1, self._chunk_blocks, row_nbytes
        )
        self.gpu = torch.zeros(gpu_blocks, row_nbytes, dtype=torch.uint8)
        self._stores: dict[int, Any] = {}  # job id -> a copy that runs in the next step
        self.stats = OffloadingConnectorStats()  # what a server would add to its metrics
        self.slowest_s = 0.0  # of all steps
        self.computed: dict[
            str, int
        ] = {}  # of each request, tokens that need no computation when first scheduled

    def submit(
        self,
        name: str,
        tokens: list[int],
        cache_salt: str | None = None,
        max_tokens: int = 2,
        transfer: dict[str, Any] | None = None,
        hints: Any = None,
    ) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        hasher = get_request_block_hasher(self.hash_tokens, self._hash)
        request = Request(name, tokens, sampling, None, cache_salt=cache_salt, block_hasher=hasher)
        request.kv_transfer_params, request.kv_hints = transfer, hints
        self.scheduler.add_request(request)
        return request

    def busy(self) -> bool:
        return self.scheduler.has_requests() or self.scheduler.connector.has_pending_push_work()

    def run(self, seconds: float = 60.0) -> None:
        """Step until nothing is left to do, transfers to the store included."""
        end = time.monotonic() + seconds
        while self.busy():
            assert time.monotonic() < end, f"still busy after {seconds} s"
            self.step()
            time.sleep(0.002)
        assert self.tier.check() == []

    def serve(self, name: str, tokens: list[int], seconds: float = 60.0) -> int:
        """Serve a prompt and return how many of its tokens were not computed."""
        self.submit(name, tokens)
        self.run(seconds)
        return self.computed[name]

    def step(self) -> None:
        start = time.monotonic()
        plan = self.scheduler.schedule()
        worker, received = OffloadingWorkerMetadata(), set()
        meta = plan.kv_connector_metadata
        for job_id, job in self._stores.items():
            rows, parts = self._places(job.src_spec, job.dst_spec)
            self.rows[rows, parts] = self.gpu[job.src_spec.block_ids]
            worker.mark_completed(job_id)
        self._stores = meta.store_jobs
        for job_id, job in meta.load_jobs.items():
            rows, parts = self._places(job.dst_spec, job.src_spec)
            self.gpu[job.dst_spec.block_ids] = self.rows[rows, parts]
            worker.mark_completed(job_id)
            received.add(job.req_id)
        for copy in getattr(plan, "kv_cache_block_copies", None) or ():
            self.gpu[copy.dst_block_id] = self.gpu[copy.src_block_id]
        for name, count in plan.num_scheduled_tokens.items():
            self._compute(self.scheduler.requests[name], count)
        names = list(plan.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [
            [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
        ]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=received, kv_connector_worker_meta=worker
            ),
        )
        for result in self.scheduler.update_from_output(plan, output).values():
            stats = result.scheduler_stats and result.scheduler_stats.kv_connector_stats
            if stats:
                self.stats.aggregate(OffloadingConnectorStats(data=stats))
        self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    def _places(self, gpu: Any, rows: Any) -> tuple[list[int], list[int]]:
        """Return the row of each block of a job, and its part of the row.

        A row is a chunk of one or several blocks. The first one of a group may miss its head.
        """
        chunk, row_ids, places = self._chunk_blocks, iter(rows.block_ids), list[tuple[int, int]]()
        for count, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            parts = range(first % chunk, first % chunk + count)
            ids = [next(row_ids) for _ in range(-(-parts.stop // chunk) if count else 0)]
            places += [(ids[part // chunk], part % chunk) for part in parts]
        return [row for row, _ in places], [part for _, part in places]

    def _compute(self, request: Request, count: int) -> None:
        done = request.num_computed_tokens - count  # schedule() has added this step's tokens
        self.computed.setdefault(request.request_id, done)
        for group, blocks in enumerate(
            self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ):
            for index, block in enumerate(blocks[: request.num_computed_tokens // BLOCK_TOKENS]):
                expected = block_bytes(request.block_hashes[index], group, self.gpu.shape[1])
                if (index + 1) * BLOCK_TOKENS > done:
                    self.gpu[block] = expected
                elif block:  # block 0 stands for blocks outside the window
                    assert torch.equal(self.gpu[block], expected), (
                        f"block {index} of group {group} is wrong"
                    )

    def close(self) -> None:
        if self.rows is not None:
            self.rows = None
            self.scheduler.shutdown()


def block_bytes(block_hash: bytes, group: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:6], "little") * 8 + group)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def prompt(count: int, seed: int = 7) -> list[int]:
    return [seed * index % 500 + 5 for index in range(count)]


def _groups(window: int | None) -> list[KVCacheGroupSpec]:
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    if window is None:
        return [KVCacheGroupSpec([f"layers.{n}" for n in range(4)], FullAttentionSpec(**shape))]
    return [
        KVCacheGroupSpec(
            ["layers.0", "layers.2"], SlidingWindowSpec(**shape, sliding_window=window)
        ),
        KVCacheGroupSpec(["layers.1", "layers.3"], FullAttentionSpec(**shape)),
    ]


def _kv_cache_config(groups: list[KVCacheGroupSpec], blocks: int) -> KVCacheConfig:
    """Return a configuration whose groups share memory: a block belongs to one group at a time."""
    tensors = []
    for group in groups:
        page = group.kv_cache_spec.page_size_bytes
        size = page * len(group.layer_names) * blocks
        tensors.append(
            KVCacheTensor(
                size=size, layers=group.layer_names, layer_stride=page * blocks, block_stride=page
            )
        )
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _vllm_config(
    model: str,
    transfer: KVTransferConfig,
    blocks: int,
    batch_tokens: int,
    changes: dict[str, Any],
) -> VllmConfig:
    cache = CacheConfig(**{"block_size": BLOCK_TOKENS, **changes})
    cache.kv_cache_layout = "LBNHC"  # normally chosen by a worker
    limits = {"max_model_len": 512, "max_num_batched_tokens": batch_tokens, "max_num_seqs": 8}
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=512
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            **limits, is_encoder_decoder=False, async_scheduling=False
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.cache_config.num_gpu_blocks = blocks
    # vLLM sets it to True on an unknown device
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config
