"""Evict blocks that vLLM has in its prefix cache, and that are never computed.

    schedule: r gets blocks --> in the prefix cache --> r is preempted for another request
                                      |                 and not part of this step any more
                                      +--> a later request finds them, and they are stored

With `--scheduling-policy priority`, vLLM up to 0.33 may preempt a request that it has scheduled in
the same step, and leaves that step's blocks in its prefix cache. Its own answers are wrong then. A
store would hand such blocks to all engines.
"""

from typing import Any


class UncomputedBlocks:
    """Evict blocks of a preempted request that no step has computed. Not thread-safe.

    `pool`: vLLM's block pool.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, pool: Any) -> None:
        self._pool = pool
        self._occur = vllm_config.scheduler_config.policy == "priority"
        # With drafts, the scheduler counts tokens that may be rejected
        self._exact = vllm_config.speculative_config is None
        groups = range(len(kv_cache_config.kv_cache_groups))
        self._groups = [number.to_bytes(4, "big") for number in groups]
        self._requests: dict[str, Any] = {}
        self._computed: dict[str, int] = {}  # tokens, by the end of the newest step

    def add(self, request: Any) -> None:
        """Note a new request."""
        if self._occur:
            self._requests[request.request_id] = request

    def finish(self, request: Any) -> None:
        """Forget a request that ends."""
        self._requests.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)

    def evict(self, output: Any) -> None:
        """Evict what the requests that were preempted in a step leave behind.

        `output`: the step as it is scheduled.
        """
        if not self._occur:
            return
        for request_id in output.preempted_req_ids or ():
            computed = self._computed.pop(request_id, 0)
            if request_id in self._requests:
                self._evict(self._requests[request_id], computed)
        if not self._exact:
            return
        running, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        starts += zip(running.req_ids, running.num_computed_tokens, strict=True)
        self._computed |= {name: start + counts[name] for name, start in starts}

    def _evict(self, request: Any, computed_tokens: int) -> None:
        hashes = request.block_hashes[computed_tokens // self._pool.hash_block_size :]
        ends = {one + group for one in hashes for group in self._groups}
        if not ends:  # a request that generates, mostly
            return
        # A hash of several units ends with the last one's in some releases
        nbytes = len(next(iter(ends)))
        wrong = {
            block.block_id
            for block in self._pool.blocks
            if block.block_hash and block.block_hash[-nbytes:] in ends
        }
        self._pool.evict_blocks(wrong)
