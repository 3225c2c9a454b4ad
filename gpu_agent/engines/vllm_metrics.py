"""Export the store's counters through vLLM: `vllm:kvstore_*`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Field of the counts that `KVStoreConnector.get_kv_connector_stats` adds up -> help.
COUNTERS = {
    "lookups": "requests whose prefix was looked up in the store",
    "lookups_failed": "lookups of the scheduler that timed out",
    "queried_tokens": "tokens of admitted requests that the engine did not have",
    "hits": "requests with a hit in the store",
    "hits_declined": "requests with a hit that would have been slower than computing",
    "hit_tokens": "tokens that loads were ordered for",
    "hit_tokens_ram": "those that lookups found in nodes' RAM",
    "hit_tokens_disk": "those on nodes' disks",
    "hit_tokens_peer": "those that a near node found at other members",
    "prefill_seconds_saved": "seconds that computing the loaded tokens would have taken, estimated "
    "from this engine's prompts",
    "handovers": "requests that waited for pages of a prefill engine",
    "handovers_short": "requests that went on without all of them",
    "handover_wait_seconds": "time that requests waited for them, summed",
    "loads": "loads, on all ranks",
    "loads_failed": "incomplete loads, on all ranks",
    "load_seconds": "time from order to end, summed over loads on all ranks",
    "pages_loaded": "pages loaded, on all ranks",
    "loaded_nbytes": "bytes loaded, on all ranks",
    "pages_saved": "pages stored, on all ranks",
    "saved_nbytes": "bytes stored, on all ranks",
    "pages_existing": "pages to be saved that the store had already",
    "pages_dropped": "pages that could not be saved",
    "agent_startups": "times that an agents' process became ready, on all ranks",
    "agent_startup_seconds": "seconds from the start of an agents' process until it was ready, "
    "summed",
}


class KVStoreStats(KVConnectorStats):
    """Counters of one interval. `data`: by the names of COUNTERS."""

    def reset(self) -> None:
        """Reset all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "KVStoreStats":
        """Add other counts."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics: a counter per count, a child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=f"kvstore: {text}", labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts to the Prometheus metrics."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
