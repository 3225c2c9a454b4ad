"""Collect what routers learn from an engine, by decoding and replaying its publisher's bytes."""

from typing import Any

import msgspec
from router_rules import MAIN_KINDS, DynamoIndex, LlmdIndex
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash


def as_map(event: KVCacheEvent) -> dict[str, Any]:
    """Return an event with its keys on the wire, defaults included."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return {"type": type(event).__name__, **fields}


class Router:
    """llm-d's and Dynamo's indexes of one engine, fed by what its publisher would send."""

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._manager = scheduler.kv_cache_manager
        self.llmd, self.dynamo = LlmdIndex(block_tokens), DynamoIndex(block_tokens)
        self.events: list[Any] = []
        scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        self.take(batch.events)

    def take(self, events: list[Any]) -> None:
        """Take one batch."""
        batch = KVEventBatch(ts=0.0, events=events, data_parallel_rank=0)
        payload = msgspec.msgpack.Encoder().encode(batch)  # as vLLM's ZmqEventPublisher
        batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
        self.events += batch.events
        self.llmd.apply("pod", map(as_map, batch.events))
        self.dynamo.apply(map(as_map, batch.events))

    def score(self, prompt: list[int]) -> float:
        """Return llm-d's score of the engine for a prompt."""
        return self.llmd.scores(prompt, ["pod"]).get("pod", 0.0)

    def check(self) -> None:
        """Compare what is known of the GPU with the engine's prefix cache."""
        cached = self._manager.block_pool.cached_block_hash_to_block._cache
        specs = self._manager.kv_cache_event_metadata
        expected = {
            maybe_convert_block_hash(get_block_hash(key))
            for key in cached
            if specs[get_group_id(key)][0] in MAIN_KINDS
        }
        assert self.dynamo.tiers["device"] == expected
        assert self.dynamo.dropped == 0
