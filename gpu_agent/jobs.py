"""What a save or a load hands to the engine, and what becomes of it."""

import concurrent.futures
import logging
import threading
from dataclasses import dataclass, replace

from kvstore.log_rate import LogRate
from kvstore.tracing import NamesRequest

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())


@dataclass(frozen=True)
class SaveResult:
    """Pages of a save: `stored` now; `existing`, stored before or just being stored by another
    writer; `dropped`, not kept, with the reason."""

    stored: int
    existing: int
    dropped: int
    reason: str | None = None


@dataclass(frozen=True)
class LoadResult:
    """`pages`: leading pages whose KV is in the engine's slots: those that skip_tokens covers
    wholly, then the `loaded` ones. Slots of later pages hold nothing of meaning: on a GPU they may
    have been written with what did not match its checksum. `error`: why a load ended early, None for a plain miss."""

    pages: int
    loaded: int
    error: str | None = None


@dataclass(frozen=True)
class SaveJob:
    """`gathered`: the engine may reuse the slots. `done`: the outcome; always comes."""

    gathered: concurrent.futures.Future[None]
    done: concurrent.futures.Future[SaveResult]


@dataclass(frozen=True)
class LoadJob:
    """`done`: the outcome; always comes. Until then the slots must not be used."""

    done: concurrent.futures.Future[LoadResult]


@dataclass
class AgentStats:
    """Counts since the agent was made. `pages_forged`: of a keyed namespace, without its seal; of the agent's client,
    which may be shared."""

    lookups: int = 0
    lookups_failed: int = 0
    saves: int = 0
    pages_stored: int = 0
    pages_existing: int = 0
    pages_dropped: int = 0
    loads: int = 0
    loads_failed: int = 0
    pages_loaded: int = 0
    pages_forged: int = 0


class AgentCounts:
    """Those of `AgentStats` as they grow, and a line of the log for what did not end well. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = AgentStats()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def saved(self, result: SaveResult) -> SaveResult:
        self.add(pages_stored=result.stored, pages_existing=result.existing, pages_dropped=result.dropped)
        if result.dropped:
            count = result.stored + result.existing + result.dropped
            log.info("%d of %d pages were not stored: %s", result.dropped, count, result.reason)
        return result

    def loaded(self, result: LoadResult) -> LoadResult:
        self.add(pages_loaded=result.loaded, loads_failed=int(result.error is not None))
        if result.error is not None:
            log.info("a load ended after %d pages: %s", result.pages, result.error)
        return result

    def now(self, **others: int) -> AgentStats:
        """A copy; `others` are counted elsewhere."""
        with self._lock:
            return replace(self._stats, **others)
