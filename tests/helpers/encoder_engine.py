"""vLLM's scheduler and our encoder connector without a model: an encoder is arithmetic.

An output follows from its identifier and number of rows, and every step checks the outputs that it
reads. Ranks are objects in one process. The order of calls is that of vLLM's model runner V1, which
drops the orders of a step that computes nothing, or of V2, which does not (`empty_steps`). Outputs
are on the GPU if there is one.
"""

import hashlib
import pickle
import time
import warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import json
    import struct

    import torch
    from scheduler_engine import BLOCK, CONFIG, _caches
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ECTransferConfig,
        ModelConfig,
        MultiModalConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    import gpu_agent.engines.vllm_encoder as adapter
    from gpu_agent.objects.tensors import CHUNK_NBYTES

WIDTH = 4096  # one row of float16 is 8 KiB, so a chunk has 128 rows
NAME = "KVStoreEncoderConnector"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAPPED_S = 60.0  # until the workers have mapped the memory; a GPU's driver is asked on a thread


def output_of(identifier: str, rows: int, width: int = WIDTH) -> torch.Tensor:
    """Return what the encoder computes, the expected output."""
    seed = int.from_bytes(hashlib.sha256(f"{identifier} {rows}".encode()).digest()[:6], "big")
    first = torch.arange(rows * width, dtype=torch.int32)
    numbers = ((first * 7919 + seed % 65521) % 2039).to(torch.float16).view(rows, width)
    return numbers.to(DEVICE)


class Worker:
    """One worker: its encoder cache and its connector."""

    def __init__(self, config: Any, rank: int, patch: Any) -> None:
        patch.setattr(adapter, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
        patch.setattr(
            adapter,
            "get_pp_group",
            lambda: SimpleNamespace(rank_in_group=0, is_first_rank=True),
        )
        patch.setattr(adapter, "prefill_context_rank", lambda: 0)
        self.connector = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
        self.cache: dict[str, torch.Tensor] = {}
        self.computed: list[str] = []


class EncoderEngine:
    """An engine of vLLM's scheduler with our encoder connector.

    `cache_rows`: rows in vLLM's own encoder cache. `overlap`: schedule a step before the result of
    the previous one is processed.
    """

    def __init__(
        self,
        model: Path,
        patch: Any,
        store: dict[str, Any],
        ranks: int = 1,
        role: str = "ec_both",
        cache_rows: int = 4096,
        blocks: int = 512,
        batch_tokens: int = 1024,
        overlap: bool = False,
        empty_steps: bool = False,
        multimodal: dict[str, Any] | None = None,
        width: int = WIDTH,
        **config: Any,
    ) -> None:
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = blocks
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=2048
            ),
            cache_config=cache,
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(DEVICE),
            scheduler_config=SchedulerConfig(
                max_model_len=2048,
                max_num_seqs=8,
                max_num_batched_tokens=batch_tokens,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=overlap,
            ),
            **config,
        )
        # A text model without media's processor; what the connector reads is here
        self.config.model_config.multimodal_config = MultiModalConfig(**(multimodal or {}))
        self.config.ec_transfer_config = ECTransferConfig(
            ec_connector=NAME,
            ec_connector_module_path="gpu_agent.engines.vllm_encoder",
            ec_role=role,
            ec_connector_extra_config=store,
        )
        parallel = self.config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = ranks
        self.workers = [Worker(self.config, rank, patch) for rank in range(ranks)]
        # The scheduler's side must not depend on which rank was made last
        self.scheduler = (AsyncScheduler if overlap else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=_caches(blocks, 0),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.max_num_encoder_input_tokens = cache_rows
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_rows)
        self._aggregator = ECOutputAggregator()
        self._running: deque[tuple[Any, Any]] = deque()
        self._overlap, self._empty_steps, self._width = overlap, empty_steps, width
        self.requests: dict[str, Request] = {}
        self.longest_step_s = 0.0
        self.lose_loads = False  # orders of loads do not reach the workers, once

    @property
    def ours(self) -> Any:
        """Return the scheduler's side of the connector."""
        return self.scheduler.ec_connector._scheduler

    @property
    def computed(self) -> list[str]:
        """Return the outputs that the encoder computed, in order."""
        return self.workers[0].computed

    def add(self, name: str, images: list[tuple[str, int]], data: Any = None) -> Any:
        """Add a request of (identifier, rows) with five tokens of text around each image."""
        features, at = [], 5
        for identifier, rows in images:
            features.append(
                MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(at, rows))
            )
            at += rows + 5
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(name, [7] * at, params, None, mm_features=features)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def run(self, limit_s: float = 20.0) -> None:
        """Step until no request is left, and every output has been stored or dropped."""
        end = time.monotonic() + limit_s
        while self.scheduler.has_requests() or self._running:
            assert time.monotonic() < end, "the engine does not finish"
            self.step()
        saves = self.workers[0].connector._worker.saves
        while saves and saves.pending:
            assert time.monotonic() < end, "a save does not end"
            time.sleep(0.001)

    def ask(self, *images: tuple[str, int]) -> list[str]:
        """Run one request and return the images that the encoder computed for it."""
        before = len(self.computed)
        self.add(f"r{len(self.requests)}", list(images))
        self.run()
        return self.computed[before:]

    def warm(self) -> None:
        """Run requests until all workers have mapped the scheduler's memory, or failed to."""
        end = time.monotonic() + MAPPED_S
        self.ask(("warm", 1))
        while self.ours and len(self.ours._mapped) < len(self.workers):
            assert time.monotonic() < end, "the memory is not mapped"
            self.ask(("warm", 1))

    def step(self) -> None:
        began = time.monotonic()
        output = self.scheduler.schedule()
        self._running.append((output, self._execute(output)))
        while len(self._running) > (self._overlap and bool(output.num_scheduled_tokens)):
            self.scheduler.update_from_output(*self._running.popleft())
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)
        loads = self.ours and self.ours._loads
        assert not loads or loads.check() == []
        if not output.num_scheduled_tokens:
            time.sleep(0.001)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _execute(self, output: Any) -> Any:
        results = [self._execute_worker(worker, output) for worker in self.workers]
        return self._aggregator.aggregate(results)

    def _execute_worker(self, worker: Worker, output: Any) -> ModelRunnerOutput:
        for identifier in output.free_encoder_mm_hashes:
            worker.cache.pop(identifier, None)
        names = list(output.num_scheduled_tokens)
        if self.lose_loads:
            self.lose_loads = False
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
            )
        if not names and not self._empty_steps:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        connector, found = worker.connector, ECConnectorOutput()
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(output.ec_connector_metadata)))
        if connector.is_consumer:
            connector.start_load_caches(worker.cache)
        for name, inputs in output.scheduled_encoder_inputs.items():
            for number in inputs:
                feature = self.requests[name].mm_features[number]
                rows = feature.mm_position.get_num_embeds()
                worker.computed.append(feature.identifier)
                worker.cache[feature.identifier] = output_of(feature.identifier, rows, self._width)
                connector.save_caches(worker.cache, feature.identifier)
        sampled = self._gather(worker, output)
        found.finished_sending, found.finished_recving = connector.get_finished(
            output.finished_req_ids
        )
        found.ec_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            ec_connector_output=None if found.is_empty() else found,
        )

    def _gather(self, worker: Worker, output: Any) -> list[list[int]]:
        """Read the embeddings of a step; an output that is missing or wrong ends the test."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.requests[name], starts[name]
            for feature in request.mm_features:
                position = feature.mm_position
                if position.offset < start + count and start < position.offset + position.length:
                    found = worker.cache[feature.identifier]
                    wanted = output_of(feature.identifier, position.length, self._width)
                    assert torch.equal(found, wanted), f"{feature.identifier} is wrong"
            sampled.append([7] if start + count >= request.num_prompt_tokens else [])
        return sampled

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()


__all__ = ["CHUNK_NBYTES", "EncoderEngine", "RequestStatus", "adapter", "output_of"]
