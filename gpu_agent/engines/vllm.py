"""Connect vLLM (0.30 and later) by its own connector interface, without a patch.

    KVSTORE_ADDRESS=store:7440 vllm serve MODEL --kv-transfer-config '{"kv_connector":
      "KVStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

    SCHEDULER   BlockScheduler: lookups, hits, which blocks to load and to save, pins
    WORKER      BlockRank: an agent per cache group, which moves them

Options: docs/engines/vllm.md.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from gpu_agent.blocks.backends import ShardPool
from gpu_agent.blocks.cost_model import LoadCostModel
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.blocks.ranks import BlockRank, LoadsEnded
from gpu_agent.blocks.save_plan import GroupBlocks, SavePlan, StepOrders
from gpu_agent.blocks.scheduler import BlockScheduler, StateOffer
from gpu_agent.engines import vllm_handover as handover
from gpu_agent.engines.vllm_hints import RequestHinter
from gpu_agent.engines.vllm_identity import (
    block_groups,
    block_sizes,
    full_hits,
    group_pools,
    prefill_context_rank,
    replicas,
    scales_in_blocks,
    with_groups,
)
from gpu_agent.engines.vllm_metadata import Handshake, Orders, RankId, RankNamespaces, WorkerReport
from gpu_agent.engines.vllm_metrics import KVStorePromMetrics, KVStoreStats
from gpu_agent.engines.vllm_multi import (
    ForeignLoads,
    NamespaceCollector,
    block_nbytes_of,
    called_by_other_connector,
    register,
    shards_of,
)
from gpu_agent.engines.vllm_options import connector_options
from gpu_agent.engines.vllm_preemption import UncomputedBlocks
from gpu_agent.identity.shards import shard_options
from gpu_agent.identity.vllm import namespaces
from gpu_agent.identity.vllm_shards import group_shards, rank_axes
from gpu_agent.worker.choice import agent_backend_for, lookup_backend_for

logger = init_logger("vllm.kvstore")

ORDER_NBYTES = 256 << 20  # of one rank's save job: blocks are pinned until all of it has been read
HOLD_S = 0.05  # time that a smaller job waits for more blocks
SCARCE_SHARE = 8  # it waits no longer if fewer than one in so many blocks is free
PINNED_SHARE = 4  # at most one in so many of the engine's blocks is pinned for saves
# Between two reports of counters while saves and loads run: each costs the engine and its listeners
# time
STATS_S = 0.25


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector, in both of vLLM's roles; vLLM calls each method in one of them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = connector_options(transfer.kv_connector_extra_config)
        self._config, self._all_caches = vllm_config, kv_cache_config
        groups = block_groups(vllm_config, kv_cache_config)
        stored = {} if isinstance(groups, str) else {n: g for n, g in enumerate(groups) if g}
        # vLLM's numbers of the groups that are stored; all else here counts only these
        self._numbers, self._groups = list(stored), list(stored.values())
        self._caches = with_groups(kv_cache_config, self._numbers)
        self._role = handover.role_of(transfer, KVStoreConnector)
        if role is KVConnectorRole.SCHEDULER:
            self._warn(groups)
        self._stats_at = 0.0
        self._computes = True
        # Scheduler
        self._pool: Any = None
        self._scheduler: BlockScheduler | None = None
        self._lookups: Lookups | None = None
        self._hints: RequestHinter | None = None
        self._hash_tokens = 0
        self._uncomputed: UncomputedBlocks | None = None
        self._scales_unset = scales_in_blocks(kv_cache_config)
        self._collector: NamespaceCollector | None = None  # until all ranks have reported
        self._others = ForeignLoads()
        # Worker
        self._rank: BlockRank | None = None
        self._rank_id: RankId = ()
        self._knows_ranks = True
        self._namespaces: RankNamespaces = []
        self._ended = LoadsEnded()

    def _warn(self, groups: Any) -> None:
        transfer = self._config.kv_transfer_config
        if isinstance(groups, str):
            logger.warning("kvstore: nothing is saved or loaded: this engine has %s", groups)
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kvstore: kv_load_failure_policy is %r: requests end with an error when a load "
                "fails; "
                'set it to "recompute"',
                transfer.kv_load_failure_policy,
            )
        if not (self._role.loads and self._role.saves):
            does = "loads" if self._role.loads else "saves" if self._role.saves else "does"
            logger.info("kvstore: by its kv_role, this engine only %s", does)
        events = self._config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            # Routers weigh an unknown medium like the GPU, and would not learn what the store
            # evicts.
            logger.info(
                "kvstore: KV events cover the engine's own cache only; the store sends none"
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: the engine need not wait for saves."""
        return False  # in a cache, a page that was not stored is computed again

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that is fastest to copy; None beside another connector."""
        # With BLHNC a block of all layers is contiguous. Backends that lack it keep their layout.
        # Beside other connectors none is requested, because vLLM exits if two request different
        # layouts.
        if called_by_other_connector(KVStoreConnector):
            logger.info(
                "kvstore: runs beside another connector, so it requests no KV cache layout; BLHNC "
                "would be faster"
            )
            return None
        return "BLHNC" if current_platform.is_cuda_alike() else None

    # ---- worker ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV cache tensors and start this rank's agents."""
        if not self._groups:
            return
        tp_rank = get_tp_group().rank_in_group
        ranks = {"tp": tp_rank, "pp": get_pp_group().rank_in_group, "cp": prefill_context_rank()}
        self._rank_id = tuple(ranks.values())
        copies = replicas(self._config, self._caches)
        options = self._options
        shards = group_shards(
            self._config,
            self._caches,
            kv_caches,
            group_pools(self._caches, kv_caches),
            rank_axes(self._config.parallel_config, ranks, copies),
            shard_options(options.own),
        )
        self._namespaces = namespaces(
            self._config,
            self._caches,
            options.identity,
            shards,
            seed=get_none_hash_seed(),
            from_hub=not envs.VLLM_USE_MODELSCOPE,
        )
        pools = [
            ShardPool(namespace, shard.pool)
            for group, parts in zip(self._namespaces, shards, strict=True)
            for namespace, shard in zip(group, parts, strict=True)
        ]
        backend = agent_backend_for(
            pools, options.client, options.agent, options.own.get("agents", "auto")
        )
        # Of ranks with the same KV only the first one stores
        self._rank = BlockRank(backend, tp_rank % copies == 0, list(map(len, shards)))
        for namespace in itertools.chain(*self._namespaces):
            logger.info(
                "kvstore: shard %d of %d of the heads, %d of %d of the layers: %d bytes per page, "
                "%s",
                namespace.tp_rank,
                namespace.tp_size,
                namespace.pp_rank,
                namespace.pp_size,
                namespace.layout.page_nbytes,
                namespace.salt,
            )

    def unregister_kv_caches(self) -> None:
        """Wait until nothing reads or writes the KV cache."""
        # Before the memory is freed (sleep mode); it returns at the same addresses
        if self._rank:
            self._rank.drain()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's namespaces for the scheduler."""
        return (
            Handshake(self._namespaces)
            if self._rank and not called_by_other_connector(KVStoreConnector)
            else None
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the scheduler's orders for a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._computes = connector_metadata.computes
        self._knows_ranks = connector_metadata.knows_ranks
        if self._rank:
            self._rank.begin(connector_metadata.orders)

    @property
    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Orders)
        return metadata.orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._rank:
            self._rank.load(self._orders.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous."""
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: saves begin after the forward pass."""
        return

    def wait_for_save(self) -> None:
        """Begin the step's saves."""
        if self._rank and self.has_connector_metadata():
            self._rank.save(self._orders.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended."""
        if not self._rank:
            return KVConnectorTransferResults()
        self._ended = self._rank.loads_ended()
        return KVConnectorTransferResults(
            finished_recving=self._ended.finished,
            failed_recving=self._ended.failed if self._fails_whole else set(),
        )

    @property
    def _fails_whole(self) -> bool:
        """Return whether a request whose load failed is computed from its start.

        Of several groups a block id is ambiguous. And where blocks are left out of a prefix, vLLM
        cannot continue from a shorter one.
        """
        return len(self._all_caches.kv_cache_groups) > 1 or self._groups[0].needs_tail_only

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a failed load left wrong."""
        wrong, self._ended = self._ended.wrong_blocks, LoadsEnded()
        return set() if self._groups and self._fails_whole else wrong

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report for the scheduler."""
        if self._rank is None:
            return None
        return WorkerReport(
            self._rank.report(), {} if self._knows_ranks else {self._rank_id: self._namespaces}
        )

    # ---- scheduler -------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = gpu_block_pool
        self._uncomputed = UncomputedBlocks(self._config, self._all_caches, gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the ranks' namespaces.

        If another connector's metadata comes, the ranks report them later.
        """
        ranks = self._config.parallel_config.world_size
        ours = [rank.namespaces for rank in metadata.values() if isinstance(rank, Handshake)]
        if self._groups and len(ours) == ranks:
            self._open(ours)
        elif self._groups and self._scheduler is None:
            logger.warning(
                "kvstore: the handshake named %d of %d ranks; nothing is saved or loaded before "
                "all have reported",
                len(ours),
                ranks,
            )
            self._collector, self._others.beside = NamespaceCollector(ranks), True
            # Its process takes seconds to start, and no step may wait for it
            self._lookups = self._lookups or self._make_lookups()

    def _open(self, all_namespaces: list[RankNamespaces]) -> None:
        """Begin to use the store: all ranks have reported."""
        shards, early, self._collector = shards_of(all_namespaces), self._collector, None
        if self._pool is None or not any(shards):
            reason = (
                "there is no block pool" if self._pool is None else "no rank has pages of its own"
            )
            logger.warning("kvstore: %s; nothing is saved or loaded", reason)
            return
        ranks = self._config.parallel_config.world_size
        options = self._options
        blocks_max = max(1, self._caches.num_blocks // PINNED_SHARE)
        order_blocks = max(1, min(ORDER_NBYTES // block_nbytes_of(all_namespaces), blocks_max // 2))
        plan = SavePlan(
            ranks,
            blocks_max,
            order_blocks,
            self._pin,
            self._unpin,
            hold_s=HOLD_S,
            scarce=self._scarce,
            cached=self._cached,
            late_max=self._caches.num_blocks,
            spare=self._spare,
        )
        self._lookups = self._lookups or self._make_lookups()
        step_tokens, self._hash_tokens = block_sizes(self._config, self._all_caches)
        self._scheduler = BlockScheduler(
            self._groups,
            shards,
            self._hash_tokens,
            step_tokens,
            self._lookups,
            plan,
            min_tokens=options.own["min_tokens"],
            cost_model=LoadCostModel(),
            takes_slow=options.own.get("slow_hits") == "take",
            full_hits=full_hits(self._all_caches),
            loads=self._role.loads,
            saves=self._role.saves,
            handover_wait_s=options.own["handover_wait_s"],
        )
        self._hints = RequestHinter(self._scheduler, self._lookups, self._groups)
        logger.info(
            "kvstore: store at %s, %d ranks, %d cache groups", options.store, ranks, len(shards)
        )
        if self._others.failed:
            self._stop_saving()
        for request in early.requests.values() if early else ():
            self._ask(request)

    def _make_lookups(self) -> Lookups:
        options = self._options
        backend = lookup_backend_for(
            options.client, current_platform.is_cuda_alike(), options.own.get("agents", "auto")
        )
        return Lookups(backend, options.agent.lookup_timeout_s)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the ranks' namespaces."""
        self.set_xfer_handshake_metadata(metadata)

    def _pin(self, blocks: Iterable[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def _unpin(self, blocks: Iterable[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def _spare(self) -> int:
        """Return how many free blocks may be pinned for saves of ended requests."""
        return int(self._pool.get_num_free_blocks() - self._caches.num_blocks // SCARCE_SHARE)

    def _scarce(self) -> bool:
        return self._spare() < 0

    def _cached(self, part: GroupBlocks) -> list[bool]:
        """Return which blocks are in vLLM's prefix cache under their keys."""
        # A hash of several units ends with the last one's in some releases.
        hashes = [self._pool.blocks[block].block_hash or b"" for block in part.blocks]
        group = self._numbers[part.group].to_bytes(4, "big")
        ends = [key + group for key in part.keys]
        return [bool(found.endswith(end)) for found, end in zip(hashes, ends, strict=True)]

    def on_new_request(self, request: Any) -> None:
        """Begin the lookup of a new request."""
        if self._uncomputed:
            self._uncomputed.add(request)
        if self._scheduler and self._wanted(request):
            self._ask(request)
        elif self._collector and self._wanted(request):
            self._collector.requests[request.request_id] = request

    def _ask(self, request: Any) -> None:
        assert self._scheduler is not None
        assert self._hints is not None
        self._hints.begin(request)
        self._scheduler.ask(request, handover.ticket_of(request, self._others.beside))

    def _wanted(self, request: Any) -> bool:
        if (request.kv_transfer_params or {}).get("kvstore.skip") or getattr(
            request, "resumable", False
        ):
            return False
        # The block hash holds a LoRA's name and path, not its weights.
        return request.lora_request is None or self._options.own.get("lora") == "named"

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return (tokens that can be loaded, whether the load is asynchronous)."""
        if not self._scheduler or self._scales_unset:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks of an admitted request."""
        if self._scheduler:
            tables = self._tables(blocks.get_block_ids())
            self._scheduler.allocated(request, tables, num_external_tokens)

    def _tables(self, tables: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return the block tables of the groups that are stored."""
        whole = len(tables) == len(self._numbers)
        return tables if whole else [tables[number] for number in self._numbers]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the ranks' orders for the step."""
        scheduled = scheduler_output.num_scheduled_tokens
        if self._uncomputed:
            self._uncomputed.evict(scheduler_output)
        if not self._scheduler:
            self._others.scheduled(0, scheduler_output)
            if self._collector:
                self._collector.count_step()
            return Orders(StepOrders(0, None, [], []), bool(scheduled), self._collector is None)
        self._scales_unset &= not scheduled  # a load is enqueued behind this step's forward
        self._computes = bool(scheduled)
        state = scheduler_output.kv_connector_block_state
        orders = self._scheduler.step(
            scheduled,
            lambda request_id: self._tables(state.get_block_ids(request_id)),
            self._offers(state),
            scheduler_output.scheduled_spec_decode_tokens,
        )
        self._others.scheduled(orders.step, scheduler_output)
        return Orders(orders, self._computes)

    def _offers(self, state: Any) -> dict[str, list[StateOffer]]:
        """Return the recurrent states that vLLM offers in this step, by request."""
        offers = getattr(state, "boundary_state_offloads", None) or {}
        return {
            request_id: [
                StateOffer(self._numbers.index(group), block, end_tokens)
                for group, block, end_tokens in states
                if group in self._numbers
            ]
            for request_id, states in offers.items()
        }

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the ranks' reports."""
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if not isinstance(report, WorkerReport):
            return
        failed = self._others.ran(report.report.step, connector_output.invalid_block_ids)
        if self._scheduler:
            if failed:  # before the scheduler releases the blocks that the step staged
                self._stop_saving()
            self._scheduler.ran(report.report)
        elif self._collector and (all_namespaces := self._collector.add(report.namespaces)):
            self._open(all_namespaces)

    def _stop_saving(self) -> None:
        """Stop saving after a failed synchronous load of another connector (`ForeignLoads`)."""
        if self._scheduler and self._scheduler.stop_saving():
            logger.error(
                "kvstore: a synchronous load of another connector failed: blocks in the prefix "
                "cache may be wrong. Nothing is saved until "
                "reset_prefix_cache(reset_connector=True)"
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request."""
        # For a connector of one group
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request and return that its blocks may be freed at once, and its ticket."""
        if self._uncomputed:
            self._uncomputed.finish(request)
        if self._scheduler:
            ticket = handover.finish(self._scheduler, request, self._tables(block_ids))
            if self._hints and self._wanted(request):
                self._hints.finish(request)
            return False, ticket
        if self._collector:
            self._collector.requests.pop(request.request_id, None)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping for us."""
        return (
            self._scheduler.busy
            if self._scheduler
            else self._collector is not None and self._collector.waiting
        )

    def reset_cache(self) -> bool | None:
        """Make everything stored so far a miss for this engine."""
        if self._scheduler:
            self._scheduler.reset()
        return True

    # ---- both ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """Return the counts since the last call; None without any."""
        counting = [
            part for part in (self._rank, self._scheduler, self._lookups) if part and part.counted
        ]
        if not counting:
            return None
        now = time.monotonic()
        busy = any(part.busy for part in (self._rank, self._scheduler) if part)
        # A step that computes nothing may be the last one: unreported counters wait for the next
        # request.
        if busy and self._computes and now < self._stats_at + STATS_S:
            return None
        self._stats_at = now
        data: dict[str, float] = {}
        for part in counting:
            for name, count in vars(part.take_counts()).items():
                if count:
                    data[name] = data.get(name, 0) + count
        return KVStoreStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """Build the counts from their data."""
        return KVStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Build the Prometheus metrics."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End pending saves in bounded time."""
        for part in (self._rank, self._lookups):
            if part:
                part.close()


register(KVStoreConnector)
