"""SGLang's radix cache, pools, allocator, admission and storage threads, without a model.

A forward pass is arithmetic on the pools of a model of `storm_models`. The KV of a token depends on
the token and on the KV of all earlier tokens, read through the request's row, as in attention.
Garbage in a slot or a state therefore spreads to all later tokens, and each answer shows whether
the whole prefix was right. `step` has the order of calls of SGLang's scheduler, whose process and
model runner are not used.
"""

import collections
import contextlib
import os
import random
import types
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# SGLang's other core is built for another version of torch
os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")

import torch
from harness import hashes
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, release_req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.pool_host import common as pool_host_common
from sglang.srt.mem_cache.unified_cache.components import mamba as mamba_component
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from storm_arithmetic import Copies, answer, attend, token_of
from storm_models import ROWS, Model

CHUNK = 32
# SGLang reads the size of the states' chunks from a model's configuration
mamba_component.mamba_cache_chunk_size = lambda: 1
mamba_component.mamba_checkpoint_grid = lambda page: page


@contextlib.contextmanager
def server(kind: str, page: int, backend_config: str = "") -> Iterator[Any]:
    """Set the arguments of an SGLang server of this kind, "hicache" or "linker"."""
    options: dict[str, Any] = {
        "page_size": page,
        "device": "cpu",
        "attention_backend": "torch_native",
    }
    if kind == "hicache":
        options |= {
            "hicache_ratio": 2.0,
            "hicache_mem_layout": "page_first",
            "hicache_io_backend": "kernel",
        }
        options |= {"hicache_write_policy": "write_through", "served_model_name": "storm"}
        options |= {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": backend_config,
        }
        options |= {"hicache_storage_prefetch_policy": "timeout"}
    with get_context().override_server_args(**options) as arguments:
        yield arguments


class StormEngine:
    """One SGLang rank under `server(...)`.

    `linker`: a function that creates the linker from the cache's parameters, or None for HiCache.
    """

    def __init__(
        self,
        model: Model,
        arguments: Any,
        rng: random.Random,
        linker: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model, self.rng = model, rng
        self.page, self._chunk = model.page, CHUNK * model.scale
        self.rows, self.allocator = model.rows, model.allocator
        params = CacheInitParams(
            False,
            self.rows,
            self.allocator,
            self.page,
            tree_components=model.components,
            tree_core_backend="python",
            sliding_window_size=model.window,
        )
        self.cache = UnifiedRadixCache(params)
        self.linker = None if linker is None else linker(params)
        if self.linker is not None:
            self.cache.init_cache_linker(self.linker)
        else:
            pool_host_common._cuda_host_register = lambda *_, **__: None
            self.cache.init_hicache(arguments, params)
            self.cache.cache_controller.l2_transfer_engine = Copies(rng, model.copy)
            self.cache.load_back_threshold = 1
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self.aborting: set[str] = set()
        self.ended: dict[str, str] = {}  # how each request has ended
        self.wrong: list[str] = []
        self.everything: list[Req] = []
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.chunked)

    # ---- requests --------------------------------------------------------------------------

    def submit(self, rid: str, prompt: Sequence[int], max_tokens: int) -> Req:
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        req = Req(rid, "", array("q", prompt), sampling, vocab_size=100_000)
        self.everything.append(req)
        self._queue(req)
        return req

    def _queue(self, req: Req) -> None:
        self.waiting.append(req)
        if self.linker is None:
            self._prefetch(req)

    def _prefetch(self, req: Req) -> None:
        """Prefetch as `Scheduler._prefetch_kvcache` does."""
        req.init_next_round_input(self.cache, cow_mamba=False)
        node, matched = req.last_host_node, req.prefix_len + req.host_hit_length
        if self.cache.is_backuped(node) or self.cache.is_root(node):
            end = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
            self.cache.prefetch_from_storage(
                req.cache_request_handle,
                node,
                req.full_untruncated_fill_ids[matched:end],
                self.cache.get_last_hash_value(node),
                None,
                matched_prefix_tokens=req.full_untruncated_fill_ids[:matched],
            )

    def abort(self, req: Req) -> None:
        """Abort as `Scheduler.abort_request` does.

        A waiting request is aborted immediately, another one when its next result is processed.
        """
        if req in self.waiting:
            self.waiting.remove(req)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            if req.kv.holds_mamba:
                release_kv_cache(req, self.cache, checkpoint=False)
            self.ended[req.rid] = "aborted"
        elif req is self.chunked or req in self.running:
            self.aborting.add(req.rid)

    def retract(self, req: Req) -> None:
        """Free the memory of a running request and queue it again, without caching its KV."""
        self.running.remove(req)
        release_req(
            req=req,
            remaing_req_count=len(self.running),
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )
        if req.rid in self.aborting:
            self.aborting.discard(req.rid)
            self.ended[req.rid] = "aborted"
        else:
            req.advance_cache_request_handle()
            self._queue(req)

    # ---- a step of the scheduler -----------------------------------------------------------

    def step(self) -> None:
        chunked = self.chunked
        if chunked is not None and chunked.rid in self.aborting:  # `process_pending_chunked_abort`
            self._drop(chunked, "aborted")
            self.chunked = None
        self.cache.check_hicache_events()
        if self.chunked is not None and self.chunked.extend_end > self.chunked.prefix_len:
            checkpoint_kv_cache(self.chunked, self.cache)
        batch = self._admit()
        if batch:
            self._extend(batch)
        elif self.running:
            self._decode()

    def _admit(self) -> list[Req]:
        resident = types.SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        adder = PrefillAdder(
            self.page, self.cache, self.allocator, resident, 0.7, 4 * self._chunk, self._chunk
        )
        had = self.chunked is not None
        if had:
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in list(self.waiting):
            if (
                adder.budget_state() == AddReqResult.OTHER
                or len(self.running) + len(adder.can_run_list) >= ROWS - 1
            ):
                break
            if self.linker is None:
                if not self.cache.check_prefetch_progress(req.cache_request_handle):
                    continue
                self.counts["from the store"] += self.cache.pop_prefetch_loaded_span(
                    req.cache_request_handle
                )[0]
            req.init_next_round_input(self.cache)
            if (
                adder.add_one_req(req, has_chunked_req=had, truncation_align_size=None)
                != AddReqResult.CONTINUE
            ):
                if req not in adder.can_run_list:
                    self.model.not_admitted(req)
                break
        self.waiting = [req for req in self.waiting if req not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        return list(adder.can_run_list)

    def _extend(self, batch: list[Req]) -> None:
        consumer = self.cache.ready_to_load_host_cache()
        alloc_for_extend(self._batch(batch, [req.extend_end for req in batch], extend=True))
        for req in batch:
            req.kv.kv_committed_len = req.extend_end
        counter = (
            self.linker.layer_done_counter
            if self.linker
            else self.cache.cache_controller.layer_done_counter
        )
        counter.set_consumer(consumer)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        computed = {req.rid: self._forward(req, req.prefix_len, req.extend_end) for req in batch}
        if self.linker is not None:
            self.counts["from the store"] += sum(req.host_loaded_length for req in batch)
        failed = self.cache.finish_external_linker_loads(batch)
        for req in batch:
            right, value = computed[req.rid]
            if req in failed:
                self.counts["failed loads"] += 1
                if req is self.chunked:
                    self.chunked = None
                self._drop(req, "failed")
                continue
            if not right:
                self.wrong.append(
                    f"{req.rid} was computed over a wrong prefix of {req.prefix_len} tokens"
                )
            if req is not self.chunked:
                self.running.append(req)
                self._result(req, value, first=True)

    def _decode(self) -> None:
        while len(self.running) > 1 and not self._has_room(len(self.running)):
            self.retract(self.running[-1])
        if not self._has_room(len(self.running)):
            self._drop(self.running.pop(), "no memory")
            return
        batch = list(self.running)
        lengths = [req.kv.kv_committed_len for req in batch]
        alloc_for_decode(self._batch(batch, lengths, extend=False), token_per_req=1)
        for req, length in zip(batch, lengths, strict=True):
            right, value = self._forward(req, length, length + 1)
            if not right:
                self.wrong.append(f"{req.rid} decodes over wrong KV")
            self._result(req, value, first=False)

    def _has_room(self, requests: int) -> bool:
        needed = requests * self.page
        self.allocator.evict_to_free_tokens(self.cache, needed)
        return bool(self.allocator.available_size() >= needed)

    def _batch(self, reqs: list[Req], lengths: list[int], extend: bool) -> Any:
        seq_lens = torch.tensor(lengths, dtype=torch.int64)
        batch = types.SimpleNamespace(
            reqs=reqs,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            device="cpu",
            req_to_token_pool=self.rows,
            tree_cache=self.cache,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            model_config=types.SimpleNamespace(is_encoder_decoder=False),
        )
        if extend:
            batch.prefix_lens = [req.prefix_len for req in reqs]
            batch.extend_lens = [req.extend_len for req in reqs]
            batch.extend_num_tokens = sum(batch.extend_lens)
        else:
            batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor(
                [req.kv.req_pool_idx for req in reqs]
            )
        return batch

    def _forward(self, req: Req, start: int, end: int) -> tuple[bool, int]:
        """Compute the KV of [start, end).

        Returns whether all earlier KV was right, and the last token's value.
        """
        known = [*req.origin_input_ids, *req.output_ids][:end]
        slots = self.rows.req_to_token[req.kv.req_pool_idx, :end].long().numpy()
        self.model.begin(req)
        past = self.model.past(req, slots[:start])
        self.counts["read"] += start
        values = attend(past, known[start:])
        self.model.write(req, slots[start:], values)
        return past == attend([], known)[:start], values[-1]

    def _result(self, req: Req, value: int, first: bool) -> None:
        if req.rid in self.aborting:
            req.to_finish = FINISH_ABORT("Aborted")
        req.output_ids.append(token_of(value))
        req.update_finish_state()
        if req.finished():
            self.running.remove(req)
            aborted = req.rid in self.aborting
            self.aborting.discard(req.rid)
            release_kv_cache(req, self.cache, checkpoint=True)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.SUCCESS)
            self.ended[req.rid] = "aborted" if aborted else "finished"
            if list(req.output_ids) != answer(req.origin_input_ids, len(req.output_ids)):
                self.wrong.append(f"{req.rid} answers wrongly")
        elif first:
            checkpoint_kv_cache(req, self.cache)

    def _drop(self, req: Req, how: str) -> None:
        self.aborting.discard(req.rid)
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
        release_kv_cache(req, self.cache, checkpoint=False)
        self.ended[req.rid] = how

    # ---- functions for tests -------------------------------------------------

    def evict(self, tokens: int, host_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens))
        if self.linker is None:
            for component in self.model.components:
                self.cache.evict_host(host_tokens, component)

    def known_pages(self) -> dict[bytes, list[int]]:
        """Return the values of all tokens up to each page's end, by the page's key."""
        pages, size = {}, self.page
        for req in self.everything:
            known = [*req.origin_input_ids, *req.output_ids]
            values = attend([], known)
            for number, key in enumerate(hashes(known[: len(known) // size * size], size)):
                pages[bytes.fromhex(key)] = values[: (number + 1) * size]
        return pages

    def leftovers(self) -> list[str]:
        """Return the locks, slots and rows that an idle engine should not hold."""
        cache, found = self.cache, []
        if cache.protected_size():
            found.append(f"{cache.protected_size()} tokens are locked")
        found += self.model.leftovers(cache)
        if self.rows.available_size() != ROWS:
            found.append(f"{self.rows.available_size()} of {ROWS} rows are free")
        if self.linker is None:
            # Host slots that back device slots are evicted only after the device slots
            sizes = {entry.name: entry.host_pool.size for entry in cache.host_pool_group.entries}
            self.evict(self.model.slots, max(sizes.values()))
            for entry in cache.host_pool_group.entries:
                pool = entry.host_pool
                if pool.available_size() != pool.size - pool.size % pool.page_size:
                    found.append(f"{pool.available_size()} of {pool.size} {entry.name} slots")
        cache.sanity_check()
        return found

    def close(self) -> None:
        if self.linker is not None:
            self.linker.close()
        else:
            self.cache.detach_storage_backend()
