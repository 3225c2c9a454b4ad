"""Serve as LightLLM's disk cache, behind its CPU cache, without changing LightLLM.

    export PYTHONPATH="$(python -m gpu_agent.engines.lightllm):$PYTHONPATH"
    python -m lightllm.server.api_server --enable_cpu_cache --enable_disk_cache ...

LightLLM imports `PyLocalCacheService` and `PyState` from `light_mem` (the folder that the command
prints), in the process that owns its pool of CPU pages. It makes one service, calls `query`, and
passes pages to `create`. Its reactions to errors, and our behaviour:

    query raises        the request is never forwarded       nothing raises, all is logged
    create raises       its writer thread is dead            a task that has failed
    a read is slow      the request waits                    load_timeout_s, then Aborted
    a page of it fails  the whole read is discarded          found pages are held until then
    a write is slow     its pages stay referenced            a page is copied out, sent later

Settings come from the environment (KVSTORE_*, KVSTORE_AGENT_*): LightLLM has no options for them.
"""

import enum
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_agent.host.page_table_tier import PageTableTier, tier_config
from gpu_agent.identity.lightllm import VARIABLES, namespace_of
from gpu_agent.load_pipeline import LoadJob, SaveJob
from gpu_agent.options import identity_of, keep_local
from kvstore.client import Client
from kvstore.config import client_config, engine_arguments, engine_variables
from kvstore.errors import InvalidRequest
from kvstore.tracing import NamesRequest, request

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

HASH_NBYTES = 16


class PyState(enum.Enum):
    """State of a page of a task.

    LightLLM only checks for Finished.
    """

    Initial = 0
    Working = 1
    Finished = 2
    Aborted = 3


class PyLocalCacheService:
    """The service that LightLLM makes for `--enable_disk_cache`.

    Thread-safe; only the constructor raises.

    `kvcache_tensor`: its pool of CPU pages, uint8 `[pages, page_nbytes]`. File, size, shards and
    workers are parameters of the original and have no meaning here: nodes keep the pages and evict
    on their own. Raises ConfigError and InvalidRequest, which end LightLLM's start.
    """

    _n = 1  # pages in a block: every page is an object of its own

    def __init__(
        self,
        kvcache_tensor: torch.Tensor,
        file: str = "",
        storage_size: int = 0,
        num_shard: int = 0,
        num_worker: int = 0,
        **others: Any,
    ) -> None:
        arguments, identity = engine_arguments("LIGHTLLM_START_ARGS"), identity_of({})
        self.namespace = namespace_of(
            arguments, engine_variables(*VARIABLES), identity, kvcache_tensor
        )
        config = client_config()
        keep_local(config)
        self._client = Client(config)
        self._pages = PageTableTier(
            self._client, self.namespace, kvcache_tensor, tier_config(kvcache_tensor)
        )
        log.info(
            "LightLLM's disk cache is the store at %s: model %s, pages of %d bytes, namespace %s; "
            "not used: --disk_cache_dir, --disk_cache_storage_size%s",
            self._client.config.address,
            self.namespace.model,
            self.namespace.layout.page_nbytes,
            self.namespace.digest.hex(),
            "".join(f", {name}" for name in sorted(others)),
        )

    def query(self, hash_128s: Sequence[int]) -> list[bool]:
        """Return which pages can be read, and hold them for that; all False on failure."""
        with request():
            try:
                return self._pages.present(_keys(hash_128s))
            except Exception:
                log.exception("a query failed")
                return [False] * len(hash_128s)

    def create(
        self,
        hash_128s: Sequence[int],
        kv_page_indexer: torch.Tensor,
        mode: str,
        start_pos: int = 0,
        **others: Any,
    ) -> "ReadTask | WriteTask":
        """Begin to store ("w") or to read ("r", from `start_pos` on) pages of a prefix.

        `kv_page_indexer` is an int32 CPU tensor with each page's row. A wrong call gets a failed
        task.
        """
        failed = WriteTask if mode == "w" else ReadTask
        with request():
            try:
                rows = _rows(kv_page_indexer, len(hash_128s))
                if mode == "w":
                    already, save = self._pages.save(_keys(hash_128s), rows)
                    return WriteTask(len(rows), save, already)
                if mode == "r":
                    read = self._pages.load(_keys(hash_128s[start_pos:]), rows[start_pos:])
                    return ReadTask(len(rows) - start_pos, read)
                raise InvalidRequest(f"mode is {mode!r}; it must be 'r' or 'w'")
            except Exception:
                log.exception("a task of mode %r failed at its start", mode)
                return failed(max(1, len(hash_128s) - start_pos))

    def active_threads(self, mode: str) -> int:
        """Return the number of a mode's tasks that are not done."""
        return self._pages.active("save" if mode == "w" else "load")

    def abort(self, task: "ReadTask | WriteTask") -> None:
        """Return when no thread uses the pages for this task, at its deadline at the latest.

        LightLLM calls this after 120 s, and every deadline is shorter, so there is nothing left to
        wait for.
        """
        try:
            if task.job is not None:
                self._pages.settle(task.job)
            task.aborted = True
        except Exception:
            log.exception("an abort failed")

    @property
    def pages(self) -> PageTableTier:
        """Return the tier that does the work."""
        return self._pages

    def close(self) -> None:
        """End pending tasks in bounded time. LightLLM never calls it: its process just ends."""
        self._pages.close()
        self._client.close()


class ReadTask:
    """Pages that are being read into rows.

    A task without a job has failed.
    """

    page_already_list: Sequence[int] = ()

    def __init__(self, count: int, job: LoadJob | None = None) -> None:
        self.job = job
        self.aborted = False
        self._count = count

    def ready(self) -> bool:
        """Return whether the read has ended."""
        return self.job is None or self.job.done.done()

    def data_safe(self) -> bool:
        """Return whether the rows may be used."""
        return self.ready()

    def state(self) -> list[PyState]:
        """Return a state per page to read."""
        if not self.ready():
            return [PyState.Working] * self._count
        loaded = self.job.done.result().pages if self.job and not self.aborted else 0
        return [PyState.Finished] * loaded + [PyState.Aborted] * (self._count - loaded)


class WriteTask:
    """Rows that are being stored.

    A task without a job has failed. `page_already_list`: rows that are not read, each once;
    constant.
    """

    def __init__(self, count: int, job: SaveJob | None = None, already: Sequence[int] = ()) -> None:
        self.page_already_list = list(already)
        self.job = job
        self.aborted = False
        self._count = count

    def ready(self) -> bool:
        """Return whether the write has ended."""
        return self.job is None or self.job.done.done()

    def data_safe(self) -> bool:
        """Return whether the rows may be reused; the pages may still be on their way."""
        return self.job is None or self.job.gathered.done()

    def state(self) -> list[PyState]:
        """Return a state per page; all pages of a task have the same state."""
        if not self.ready():
            return [PyState.Working] * self._count
        kept = self.job is not None and not self.aborted and self.job.done.result().dropped == 0
        return [PyState.Finished if kept else PyState.Aborted] * self._count


def _keys(hash_128s: Sequence[int]) -> list[bytes]:
    return [int(value).to_bytes(HASH_NBYTES, "big") for value in hash_128s]


def _rows(indexer: torch.Tensor, count: int) -> list[int]:
    if indexer.dtype != torch.int32 or not indexer.is_cpu or list(indexer.shape) != [count]:
        raise InvalidRequest(
            f"kv_page_indexer must be an int32 CPU tensor of shape [{count}], not {indexer.dtype} "
            f"{list(indexer.shape)} on {indexer.device}"
        )
    rows: list[int] = indexer.tolist()
    return rows


def light_mem_path() -> str:
    """Return the folder that makes `import light_mem` find this module."""
    return str(Path(__file__).parent / "light_mem_path")


if __name__ == "__main__":
    print(light_mem_path())
