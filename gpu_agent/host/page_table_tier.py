"""Store whole pages of an engine's host memory, as the tier below the engine's own CPU cache.

    host memory [pages, page_nbytes] --- SlotCopies: whole rows --- Agent --- client

The engine waits for lookups here, so they are short: a store that does not answer is a miss. Pages
found by `present` stay readable until they can be loaded: they are pinned for a limited time,
because such an engine discards a whole load if one page is missing. Pages are copied
(`SlotCopies`), never received into a row directly: two requests may load the same row, and the
later one would write unverified bytes over a row in use.
"""

import concurrent.futures
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_agent.agent import Agent, AgentStats
from gpu_agent.host.slot_copies import SlotCopies
from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.load_pipeline import LoadJob, SaveJob, SaveResult
from gpu_agent.options import AgentConfig
from gpu_agent.pool import KVPool
from kvstore.client import Client
from kvstore.config import load, setting
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import PAGE_TOKENS_MAX
from kvstore.sync import Future
from kvstore.threads import wait_for

_SPACE = "page"
# Found pages are held for as long as a load may take; held pages can not be evicted for others.
HOLD_S_MAX = 2.0
_PENDING_NBYTES_MAX = 1 << 40


@dataclass(frozen=True)
class TierConfig(AgentConfig):
    """Configuration of an agent whose engine waits.

    Environment as AgentConfig: KVSTORE_AGENT_LOAD_TIMEOUT_S, ...
    """

    workers: int = setting(4, "threads for saves, and as many for loads", 1, 64)
    lookup_timeout_s: float = setting(0.5, "deadline of a lookup", 0.001, 10.0)
    save_timeout_s: float = setting(
        10.0, "deadline of a save, its wait for a thread included", 0.001, 60.0
    )
    load_timeout_s: float = setting(
        1.0, "deadline of a load, its wait for a thread included", 0.001, 60.0
    )


def tier_config(memory: torch.Tensor, **values: Any) -> TierConfig:
    """Return a configuration that fits the host memory.

    A buffer holds at least a page. Loads fill pages that the engine has allocated, so twice the
    memory is the most that can wait, and no prompt that fits is refused for its length.
    """
    config = load(TierConfig, "KVSTORE_AGENT", values)
    staging_nbytes = max(config.staging_nbytes, memory.shape[-1])
    pending_nbytes_max = min(
        max(config.pending_nbytes_max, 2 * memory.nbytes, staging_nbytes), _PENDING_NBYTES_MAX
    )
    return replace(config, staging_nbytes=staging_nbytes, pending_nbytes_max=pending_nbytes_max)


def row_pool(memory: torch.Tensor, page_tokens: int) -> KVPool:
    """View uint8 CPU memory `[pages, page_nbytes]` as a pool with a row per page."""
    check_shape("host memory", memory, "pages", "page_nbytes")
    if memory.dtype != torch.uint8 or not memory.is_cpu or not memory.is_contiguous():
        raise InvalidRequest(
            f"host memory must be a contiguous uint8 CPU tensor, not {memory.dtype} with strides "
            f"{list(memory.stride())} on {memory.device}"
        )
    # The page's inner structure is not used; a hybrid model's page may have that many tokens
    tokens = min(page_tokens, PAGE_TOKENS_MAX)
    return pool_of(
        tokens, GroupView("host", (0,), {"page": [memory]}, unit_tokens=tokens, space=_SPACE)
    )


class PageTableTier:
    """A tier of pages in host memory. Thread-safe.

    `memory` as in `row_pool`; `namespace.layout` is its layout. `client` is not closed here.
    """

    def __init__(
        self, client: Client, namespace: Namespace, memory: torch.Tensor, config: TierConfig
    ) -> None:
        pool = row_pool(memory, namespace.layout.page_tokens)
        self._agent = Agent(client, namespace, pool, config, SlotCopies())
        self._row_count = memory.shape[0]
        self._hold_s = min(config.load_timeout_s, HOLD_S_MAX)
        self._lock = threading.Lock()
        self._active = {"save": 0, "load": 0}

    def present(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return which pages are stored, and hold them until a load that begins now would end."""
        return list(self._agent.ask(prefix_hashes, self._hold_s) or (False,) * len(prefix_hashes))

    def save(
        self, prefix_hashes: Sequence[bytes], rows: Sequence[int]
    ) -> tuple[list[int], SaveJob]:
        """Begin to save pages; return (rows that are not read, job).

        Rows of pages that are stored already are not read, and the engine may reuse them at once.
        If the store does not answer, nothing is saved. Raises InvalidRequest for a wrong or
        repeated row.
        """
        self._check_rows(rows, len(prefix_hashes))
        found = self._agent.ask(prefix_hashes)
        if found is None:
            return [], _nothing_saved(len(rows))
        missing = [page for page, stored in enumerate(found) if not stored]
        job = self._agent.save(
            [prefix_hashes[page] for page in missing], _units([rows[page] for page in missing])
        )
        self._count("save", job.done)
        return [rows[page] for page, stored in enumerate(found) if stored], job

    def load(self, prefix_hashes: Sequence[bytes], rows: Sequence[int]) -> LoadJob:
        """Begin to fill rows with the leading stored pages. Raises InvalidRequest as `save`."""
        self._check_rows(rows, len(prefix_hashes))
        job = self._agent.load(prefix_hashes, _units(rows))
        self._count("load", job.done)
        return job

    def settle(self, job: SaveJob | LoadJob) -> None:
        """Wait, at most until the job's deadline, until no thread uses the memory for it.

        A running copy can not be cancelled, so this waits.
        """
        last: concurrent.futures.Future[Any] = (
            job.gathered if isinstance(job, SaveJob) else job.done
        )
        wait_for([last])

    def active(self, kind: str) -> int:
        """Return how many jobs of a kind, 'save' or 'load', are not done."""
        with self._lock:
            return self._active[kind]

    @property
    def stats(self) -> AgentStats:
        """Return the counts so far."""
        return self._agent.stats

    def close(self) -> None:
        """End pending jobs in bounded time."""
        self._agent.close()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        wrong = [f"{count} active {kind}s" for kind, count in self._active.items() if count < 0]
        return self._agent.check() + wrong

    def _check_rows(self, rows: Sequence[int], page_count: int) -> None:
        if len(rows) != page_count or len(set(rows)) != len(rows):
            raise InvalidRequest(
                f"rows {list(rows)} of the host memory are not {page_count} different ones"
            )
        if rows and not 0 <= min(rows) <= max(rows) < self._row_count:
            raise InvalidRequest(f"rows {list(rows)} are not all in 0..{self._row_count - 1}")

    def _count(self, kind: str, done: "concurrent.futures.Future[Any]") -> None:
        with self._lock:
            self._active[kind] += 1
        done.add_done_callback(lambda _: self._uncount(kind))

    def _uncount(self, kind: str) -> None:
        with self._lock:
            self._active[kind] -= 1


def _units(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int64)


def _nothing_saved(count: int) -> SaveJob:
    gathered: concurrent.futures.Future[None] = Future()
    done: concurrent.futures.Future[SaveResult] = Future()
    gathered.set_result(None)
    done.set_result(SaveResult(0, 0, count, "the store can not be asked"))
    return SaveJob(gathered, done)
