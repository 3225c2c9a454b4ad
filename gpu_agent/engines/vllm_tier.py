"""Serve as a tier behind vLLM's own CPU offloading (vLLM 0.32 and newer).

    GPU <-> rows of the CPU tier (vLLM moves these) <-> store (we move these, a page per row)

    row := one chunk of one KV-cache group: every layer of every rank, padded to 4096 bytes
    key := block hash (32 bytes) || group (4 bytes, big-endian), which is our prefix hash as it is

vLLM calls a tier in the scheduler's process, in the middle of a step: only `drain_jobs` and
`shutdown` wait for the store. A failing store is a miss: pages are verified in their rows before a
request may use them, so a load into the GPU never fails because of us.
"""

import concurrent.futures
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from gpu_agent.agent import Agent, AgentStats
from gpu_agent.engines.vllm_hints import hints_of
from gpu_agent.engines.vllm_identity import (
    check_tier_groups,
    scales_in_blocks,
    tier_state_facts,
)
from gpu_agent.engines.vllm_multi import register
from gpu_agent.engines.vllm_preemption import UncomputedBlocks
from gpu_agent.hint_sender import HintQueue, HintSender
from gpu_agent.hints import NOTHING
from gpu_agent.host.slot_copies import SlotCopies
from gpu_agent.identity.checkpoint import named
from gpu_agent.identity.vllm import check_tier, model_facts, tier_facts, tier_namespace, weights_of
from gpu_agent.lookup_cache import LookupCache
from gpu_agent.options import Identity, Options, identity_of, read_options
from gpu_agent.pool import KVPool
from kvstore.client import Client
from kvstore.errors import ConfigError, KVStoreError
from kvstore.threads import wait_for
from kvstore.tracing import NamesRequest, request

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

# Options of a tier beside those of `gpu_agent.options`; our connector fills in the first two.
_OWN_OPTIONS = ("facts", "weights", "locality", "lora")
# Arguments that vLLM passes to a tier, in one release or another. They are no options.
_BASE_ARGUMENTS = {
    *("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    *("admission", "lifecycle"),
}
# Fields of AgentStats as Prometheus counters, beside those that vLLM keeps of every tier.
_COUNTERS = {
    "lookups": "Batches of keys that were looked up in the store.",
    "lookups_failed": "Batches of keys that the store did not answer for in time: misses.",
    "pages_stored": "Pages stored now.",
    "pages_existing": "Pages to store that were stored already.",
    "pages_dropped": "Pages to store that were not: the store failed, was too slow or full.",
    "pages_loaded": "Pages that reached the CPU tier intact.",
    "pages_forged": "Pages of a keyed namespace without a valid HMAC: misses.",
    "loads_failed": "Loads that ended early because the store failed or was too slow.",
}


class KVStoreOffloadingConnector(OffloadingConnector):  # type: ignore[misc, unused-ignore]
    """vLLM's OffloadingConnector, which tells our tier how the engine computes its KV.

    vLLM passes a tier little of its configuration: not the revision, the quantisation of the
    weights, or the attention backend that reads the bytes. Without this connector these must be
    named by hand (`salt`).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        tiers = (
            vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers") or ()
        )
        # The process that has a tier, before weights are loaded
        for tier in tiers if role is KVConnectorRole.SCHEDULER else ():
            if tier.get("module_path") == __name__:
                check_tier_groups(vllm_config, kv_cache_config)
                tier |= tier_options(vllm_config, tier)
                tier["facts"] |= tier_state_facts(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._uncomputed: UncomputedBlocks | None = None
        self._configs = vllm_config, kv_cache_config
        self._scales_unset = scales_in_blocks(kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._uncomputed = UncomputedBlocks(*self._configs, gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Begin with a request."""
        super().on_new_request(request)
        if self._uncomputed:
            self._uncomputed.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return (tokens that can be loaded, whether the load is asynchronous).

        There is no hit before the first forward pass, which overwrites all scales in blocks.
        """
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (0, False) if self._scales_unset and found[0] else found

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the workers' orders for the step."""
        self._scales_unset &= not scheduler_output.num_scheduled_tokens
        if self._uncomputed:
            self._uncomputed.evict(scheduler_output)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """End a request."""
        if self._uncomputed:
            self._uncomputed.finish(request)
        return super().request_finished_all_groups(request, block_ids)


register(KVStoreOffloadingConnector)


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc, unused-ignore]
    """The tier, one per engine, in the scheduler's process.

    Not thread-safe: vLLM calls it under its manager's lock.

    `primary_kv_view`: the CPU tier's memory, `[chunks, row_nbytes]`. `values`: arguments that only
    some releases of vLLM's base class have, and the options, flat. Raises ConfigError for a wrong
    option; the node need not run.

    It has no `take_events`: an engine does not learn what the node evicts
    (docs/decisions/0055-router-events.md).
    """

    medium = Medium.STORAGE  # for requests that name the tiers they load from
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's word for a remote store

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **values: Any
    ) -> None:
        given = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
        }
        arguments, values = split_arguments(SecondaryTierManager.__init__, given | values)
        super().__init__(**arguments)
        options = read_options(values, _OWN_OPTIONS)
        self.locality = _locality(options.own.get("locality", "REMOTE"))
        rows = torch.frombuffer(primary_kv_view, dtype=torch.uint8).view(-1, self.block_size_bytes)
        identity, facts = _named(offloading_spec.config, options), options.own.get("facts") or {}
        self.namespace = namespace = tier_namespace(
            offloading_spec.config, identity, facts, rows.shape[1]
        )
        pool = KVPool(namespace.layout, {("opaque", 0, "bytes"): rows})
        # Waiting rows are vLLM's existing memory and cost us nothing, so all of them may wait.
        config = replace(
            options.agent,
            staging_nbytes=max(options.agent.staging_nbytes, rows.shape[1]),
            pending_nbytes_max=max(
                options.agent.pending_nbytes_max, options.agent.staging_nbytes, rows.nbytes
            ),
        )
        self._client = Client(options.client)
        self._agent: Agent = Agent(self._client, namespace, pool, config, SlotCopies())
        self._lookups = LookupCache(self._agent.present, config.lookup_timeout_s)
        self._hint_queue = HintQueue(self._client, config.lookup_timeout_s)
        self._hints = HintSender(self._hint_queue.send)
        self._jobs: dict[int, _TierJob] = {}
        self._reported = AgentStats()  # counters that `get_stats` has returned
        log.info("tier %s at %s, namespace %s", tier_type, options.store, namespace.digest.hex())

    # ---- lookups ---------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Return an empty context, and note the request's session."""
        self._hints.begin(hints_of(req_context))
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a key's row is stored, or that it is not known yet."""
        found = self._lookups.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Send the lookups of a step."""
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request's lookups, and end its session if it was the last."""
        self._lookups.release(req_context.req_id)
        self._hints.end(hints_of(req_context), [[self.namespace]])

    # ---- jobs ------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store rows."""
        self._submit(job_metadata, lambda keys, rows: self._agent.save(keys, rows).done)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load rows."""
        self._submit(job_metadata, lambda keys, rows: self._agent.load(keys, rows).done)

    def _submit(
        self, metadata: Any, start: Callable[[list[bytes], torch.Tensor], "_Future"]
    ) -> None:
        job = _TierJob(metadata.is_promotion, metadata.req_context)
        with request(getattr(metadata.req_context, "req_id", None)):
            for keys, rows in _by_group(metadata):
                try:
                    job.add(keys, start(keys, rows))
                except KVStoreError as error:  # our own mistake must not end the engine
                    log.error("a transfer of %d rows was refused: %s", len(keys), error)
                    job.add(keys, None)
        self._jobs[metadata.job_id] = job

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended."""
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._finish(job_id, self._jobs.pop(job_id)) for job_id in done]

    def _finish(self, job_id: int, job: "_TierJob") -> Any:
        moved, lost = job.outcome()
        if moved and (said := hints_of(job.context)) != NOTHING:
            ends = [job.context.get_offload_key_position(key) or 1 for key in moved]
            self._hints.send(said, [([self.namespace], moved)], [[end - 1 for end in ends]])
        if job.is_load:
            # otherwise the scheduler would request the same load for ever
            self._lookups.mark_miss(lost)
        return JobResult(
            job_id=job_id,
            success=not lost,
            successful_keys=tuple(moved) if job.is_load and moved and lost else None,
            transfer_time=job.ended - job.started,
            transfer_bytes=len(moved) * self.block_size_bytes,
        )

    def has_pending_work(self) -> bool:
        """Return whether jobs run."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait for all jobs, which end by their deadlines.

        None is aborted, each is still reported.
        """
        for job in self._jobs.values():
            job.wait()

    def shutdown(self) -> None:
        """End all transfers before vLLM unmaps the rows."""
        self._hint_queue.close()
        self._lookups.close()
        self._agent.close()
        self._client.close()

    # ---- counts ----------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the definitions of the metrics."""
        return {
            _metric(name): OffloadingCounterMetadata(documentation=text)
            for name, text in _COUNTERS.items()
        }

    def get_stats(self) -> Any:
        """Return the counts since the last call; vLLM adds them up."""
        stats, now = OffloadingConnectorStats(), replace(self._agent.stats)
        for name in _COUNTERS:
            if count := getattr(now, name) - getattr(self._reported, name):
                stats.increase_counter(_metric(name), count)
        self._reported = now
        return stats

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self._agent.check() + self._lookups.check()


def split_arguments(
    function: Callable[..., Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that a function of vLLM takes by name in this release, and the others.

    Values of `_BASE_ARGUMENTS` are in neither part if the function does not take them.
    """
    names = inspect.signature(function).parameters
    taken = {name: value for name, value in values.items() if name in names}
    others = {name: values[name] for name in values.keys() - taken.keys() - _BASE_ARGUMENTS}
    return taken, others


def _metric(name: str) -> str:
    return f"vllm:kvstore_tier_{name}"


_Future = concurrent.futures.Future[Any]  # with a SaveResult or a LoadResult


class _TierJob:
    """A transfer of vLLM's as some of ours, one for each group.

    A future of None was refused.
    """

    def __init__(self, is_load: bool, context: Any) -> None:
        self.is_load = is_load
        self.context = context  # of the request
        self.started = self.ended = time.monotonic()
        self._parts: list[tuple[list[bytes], _Future | None]] = []

    def add(self, keys: list[bytes], future: "_Future | None") -> None:
        """Add a part, its keys in the order of their tokens."""
        self._parts.append((keys, future))
        if future:
            future.add_done_callback(self._stamp)

    def _stamp(self, _: Any) -> None:
        self.ended = time.monotonic()

    def done(self) -> bool:
        return all(future is None or future.done() for _, future in self._parts)

    def wait(self) -> None:
        wait_for([future for _, future in self._parts if future])

    def outcome(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that arrived and the others."""
        moved: list[bytes] = []
        lost: list[bytes] = []
        for keys, future in self._parts:
            count = 0
            if future:
                result = future.result()
                # vLLM does not ask which pages of a save were dropped.
                count = result.pages if self.is_load else len(keys) - result.dropped
            moved += keys[:count]
            lost += keys[count:]
        return moved, lost


def _by_group(metadata: Any) -> Iterable[tuple[list[bytes], torch.Tensor]]:
    """Return a job's keys and rows by group, each in the order of tokens.

    Groups are separate chains: a missing page shortens only its own group.
    """
    groups: dict[int, list[tuple[int, bytes, int]]] = defaultdict(list)
    for key, row in zip(metadata.keys, metadata.chunk_ids.tolist(), strict=True):
        position = metadata.req_context.get_offload_key_position(key) or 0
        groups[get_offload_group_idx(key)].append((position, key, row))
    for chain in groups.values():
        chain.sort()
        yield (
            [key for _, key, _ in chain],
            torch.tensor([row for _, _, row in chain], dtype=torch.int64),
        )


# ---- identity of the pages --------------------------------------------------------------------


def _named(config: Any, options: Options) -> Identity:
    """Return the options with the weights named by our connector or by hand. Raises ConfigError."""
    weights = options.own.get("weights")
    if weights:
        model, revision = weights
        return replace(options.identity, model=model, revision=revision)
    if not (options.identity.salt and options.identity.revision):
        raise ConfigError(
            "vLLM's OffloadingConnector does not tell a tier which weights and which attention "
            "backend the engine "
            'uses; set "kv_connector": "KVStoreOffloadingConnector" and '
            '"kv_connector_module_path": '
            f'"{__name__}", or name them by hand in the tier\'s options revision and salt'
        )
    _check_groups_by_hand(config.groups)
    return named(options.identity, config.model.name)


def _check_groups_by_hand(groups: Sequence[Any]) -> None:
    """Raise ConfigError for groups that may hold recurrent state.

    vLLM tells a tier how far back a group reaches, not its kind, and a recurrent state looks like a
    short window. With a vLLM that does not tell even that, only one group is accepted.
    """
    unknown = len(groups) if len(groups) > 1 else None
    for group in groups:
        if getattr(group, "sliding_window_size_in_chunks", unknown) is not None:
            raise ConfigError(
                "vLLM's OffloadingConnector does not tell a tier what KV cache group "
                f"{group.group_id} "
                f"({group.layer_names[0]}) holds: a sliding window, or a recurrent state (Mamba, "
                "linear attention) "
                'that KVStoreTier can not take. Set "kv_connector": "KVStoreOffloadingConnector" '
                "and "
                f'"kv_connector_module_path": "{__name__}", which tells them apart'
            )


def tier_options(vllm_config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the connector adds to a tier's options.

    Raises ConfigError for an engine whose blocks cannot be shared and for weights without a name.
    """
    check_tier(vllm_config, values.get("lora", ""))
    user, from_hub = identity_of(values), not envs.VLLM_USE_MODELSCOPE
    identity = weights_of(vllm_config, user, from_hub)
    capability = current_platform.get_device_capability()
    device = f"{current_platform.device_name}{capability.as_version_str() if capability else ''}"
    facts = model_facts(vllm_config, bool(user.revision), from_hub)
    facts = tier_facts(vllm_config, vllm.__version__, device, facts)
    return {"facts": facts, "weights": [identity.model, identity.revision]}


def _locality(name: str) -> Any:
    if name not in Locality.__members__:
        raise ConfigError(f"locality={name!r} must be one of {', '.join(Locality.__members__)}")
    return Locality[name]
