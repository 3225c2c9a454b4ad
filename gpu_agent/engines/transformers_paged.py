"""Load and save the paged cache of Hugging Face transformers (continuous batching, 5.19 or newer).

    adapter.load(tokens)     before manager.add_request(tokens), which then finds the blocks
    adapter.save(tokens)     after the request, or while others run

A block of the paged cache is a page of the same layout that `transformers.py` stores, so both share
pages. The generation loop is paused only while block tables are read or changed, not while bytes
move: meanwhile a request of ours, which the scheduler does not know, holds the blocks.

    load    pause: take free blocks | pages move | pause: set their hashes, release: they are cached
    save    pause: hold the prefix  | pages move | pause: release
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState

import kvstore.tracing as tracing
from gpu_agent.agent import Agent
from gpu_agent.engines.transformers import namespace_of
from gpu_agent.identity.transformers import KV_GROUP, check_adapters
from gpu_agent.load_pipeline import SaveResult
from gpu_agent.options import AgentConfig, keep_local
from gpu_agent.pool import KVPool
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.keys import prefix_hashes
from kvstore.threads import wait_for

log = logging.getLogger(__name__)

_FULL = "full_attention"


class PagedAdapter:
    """Save and load the KV of one manager of continuous batching, which must have been started.

    `name` and `revision`: as in `TransformersAdapter`; the tokens of a page are the cache's
    `page_size`. Thread-safe. Calls return by the agent's deadlines and wait for the loop's next
    batch; the loop does not wait for the store. End them before the manager is stopped and started
    again: it then gives all blocks to others. Raises InvalidRequest for a manager whose blocks can
    not be shared.
    """

    def __init__(
        self,
        client: Client,
        manager: ContinuousBatchingManager,
        name: str,
        revision: str | None = None,
        config: AgentConfig | None = None,
    ) -> None:
        self._manager: Any = manager
        self._model: Any = manager.model
        if not hasattr(manager, "pause") or not manager.is_running():
            raise InvalidRequest(
                "the manager does not run (call start()), or transformers is older than 5.19"
            )
        if manager.distributed_helper.tp_size > 1:
            raise InvalidRequest(
                "the manager is one of several in a tensor-parallel group; only one alone can be "
                "paused"
            )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        with manager.pause():  # the loop makes the cache when it begins
            processor: Any = manager.batch_processor
            self._cache = _check_shareable(processor.cache)
        self._blocks = self._cache.cache_allocators[_FULL]
        self._page_tokens = int(self._blocks.tokens_per_page)
        whose = (client.key_id, client.tenant)
        self.namespace = namespace_of(self._model, name, revision, self._page_tokens, *whose)
        keep_local(client.config)
        self._agent = Agent(
            client, self.namespace, _pool(self.namespace.layout, self._blocks), config
        )

    def load(self, tokens: Sequence[int]) -> int:
        """Load stored blocks and return how many leading `tokens` are in the cache now.

        They are cached like those of an earlier request: transformers may evict them for a running
        one.
        """
        check_adapters(self._model)
        with tracing.request():
            return self._load(list(tokens))

    def _load(self, ids: list[int]) -> int:
        # A model needs a token to compute the next
        hashes = prefix_hashes(ids[:-1], self._page_tokens)
        stored = self._agent.lookup(hashes)
        if not stored:
            return 0
        count = stored * self._page_tokens
        request = RequestState(f"kvstore-load-{next(self._numbers)}", ids[:count])
        with self._request_blocks(request.request_id) as jobs:
            with self._paused():
                here = self._cache.search_prefix_match(request.request_id, ids[: count + 1])
                if here == count or not self._cache.can_store_request_tokens(request, count):
                    return int(here)
                units = self._units(request.request_id, count)
            job = self._agent.load(hashes[:stored], units, skip_tokens=here)
            jobs.append(job.done)
            loaded = job.done.result()
            with self._paused():
                self._cache.mark_complete_blocks(request, {_FULL: loaded.loaded})
        return loaded.pages * self._page_tokens

    def save(self, tokens: Sequence[int]) -> SaveResult:
        """Store the cached blocks of `tokens`, of a running or an ended request.

        Blocks that were evicted count as dropped.
        """
        check_adapters(self._model)
        with tracing.request():
            return self._save(list(tokens))

    def _save(self, ids: list[int]) -> SaveResult:
        hashes = prefix_hashes(ids, self._page_tokens)
        request_id = f"kvstore-save-{next(self._numbers)}"
        with self._request_blocks(request_id) as jobs:
            with self._paused():
                # It leaves the last token out
                here = self._cache.search_prefix_match(request_id, [*ids, 0])
                units = self._units(request_id, here) if here else torch.empty(0, dtype=torch.int64)
            pages = here // self._page_tokens
            job = self._agent.save(hashes[:pages], units)
            jobs.append(job.done)
            result = job.done.result()
        if pages == len(hashes):
            return result
        lost = len(hashes) - pages
        return SaveResult(
            result.stored,
            result.existing,
            result.dropped + lost,
            result.reason or "not in the cache",
        )

    def close(self) -> None:
        """Close the agent; manager and client stay open."""
        self._agent.close()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        held = [name for name in self._blocks.block_table if name.startswith("kvstore-")]
        return self._agent.check() + ([f"blocks are held by {held}"] if held else [])

    def __enter__(self) -> "PagedAdapter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _request_blocks(self, request_id: str) -> Iterator[list[Future[Any]]]:
        """Release a request's blocks at the end: cached if they have a hash, else free.

        The jobs in the yielded list use them and end first, by their deadlines. If an interrupt
        comes just when a job may have begun, the blocks are never released: the job's end is
        unknown.
        """
        jobs: list[Future[Any]] = []
        try:
            yield jobs
        except BaseException as error:
            if jobs or isinstance(error, Exception):
                self._let_go(request_id, jobs)
            raise
        self._let_go(request_id, jobs)

    def _let_go(self, request_id: str, jobs: Sequence[Future[Any]]) -> None:
        try:
            wait_for(jobs)
        finally:
            with self._paused():
                self._cache.free_blocks(request_id)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause the manager's loop, so that it does not change block tables.

        A loop that has ended needs no pause.
        """
        with self._lock, contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._manager.pause())
            except RuntimeError:
                if self._manager.is_running():
                    raise
            yield

    def _units(self, request_id: str, count: int) -> torch.Tensor:
        return torch.tensor(self._blocks.get_write_indices(request_id, 0, count), dtype=torch.int64)


def _check_shareable(cache: Any) -> Any:
    """Return the cache if a prefix's blocks determine it. Raises InvalidRequest."""
    kinds = sorted(cache.cache_allocators)
    if kinds != [_FULL]:
        raise InvalidRequest(
            f"the paged cache has layers of {', '.join(kinds)}; only full attention can be stored"
        )
    if not cache.use_prefix_sharing:
        raise InvalidRequest(
            "the manager shares no prefixes, so that nobody would find what is loaded; set "
            "allow_block_sharing=True"
        )
    return cache


def _pool(layout: Any, blocks: Any) -> KVPool:
    """View `blocks.cache_tensor`, `[tokens, 2, heads, dim]`, as a pool.

    It has, for each block and layer, the keys and then the values. A token's index, as in the cache
    itself, is that of its keys in the first layer.
    """
    rows = blocks.cache_tensor.view(-1, *blocks.cache_tensor.shape[2:])
    tensors = {}
    for position, layer in enumerate(blocks.layer_indices):
        for plane, name in enumerate(("k", "v")):
            tensors[KV_GROUP, layer, name] = rows[(2 * position + plane) * blocks.tokens_per_page :]
    return KVPool(layout, tensors)
