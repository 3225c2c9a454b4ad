"""Run inside vLLM's `MultiConnector`, beside other connectors such as NIXL's.

The scheduler needs the namespaces of all ranks. How it gets them:

    alone               handshake metadata, before the first request
    in MultiConnector   worker metadata of all ranks (`NamespaceCollector`), after the first step

`MultiConnector` takes the first handshake metadata that one of its connectors returns and passes it
to all of them. NIXL raises if it gets ours. So there our connector returns none and ignores that of
others, and the ranks add their namespaces to their reports until the scheduler confirms that it has
them.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from gpu_agent.engines.vllm_metadata import RankId, RankNamespaces
from kvstore.keys import Namespace

# An idle engine steps so often to collect the ranks' namespaces before its first request. Bounded,
# because a rank without a store never reports.
STEPS_MAX = 64


def called_by_other_connector(connector: type) -> bool:
    """Return whether an enclosing connector called the calling method of `connector`."""
    return any(True for _ in _callers(connector))


def enclosing_connectors(connector: type) -> list[KVConnectorBase_V1]:
    """Return the enclosing connectors, of which one called the calling method of `connector`."""
    return [outer for outer in _callers(connector) if isinstance(outer, KVConnectorBase_V1)]


def _callers(connector: type) -> Iterator[Any]:
    """Yield the other connectors, or their classes, in the call stack.

    vLLM gives a connector in `MultiConnector` a configuration that does not mention the outer one,
    so only the call stack tells. A wrapper or a generator may lie between, so all of it is
    searched. Unrecognised callers count as vLLM itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        caller = names.get("self", names.get("cls"))
        kind = caller if isinstance(caller, type) else type(caller)
        if issubclass(kind, KVConnectorBase_V1) and not issubclass(kind, connector):
            yield caller
        frame = frame.f_back


def register(connector: type[KVConnectorBase_V1]) -> None:
    """Register the class with vLLM's factory.

    `MultiConnector` looks connectors up by name to rebuild their statistics, and raises for unknown
    names.
    """
    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(
            connector.__name__, connector.__module__, connector.__name__
        )


class NamespaceCollector:
    """The namespaces of an engine's ranks, collected by the scheduler from their reports.

    `requests` keeps requests that arrive before all ranks have reported.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._by_rank: dict[RankId, RankNamespaces] = {}
        self._steps = 0
        self.requests: dict[str, Any] = {}

    def add(self, namespaces: Mapping[RankId, RankNamespaces]) -> list[RankNamespaces] | None:
        """Add reports.

        Return the namespaces of all ranks once all have reported, else None.
        """
        self._by_rank.update(namespaces)
        return (
            [namespaces for _, namespaces in sorted(self._by_rank.items())]
            if len(self._by_rank) >= self._ranks
            else None
        )

    def count_step(self) -> None:
        """Count a step."""
        self._steps += 1

    @property
    def waiting(self) -> bool:
        """Return whether an idle engine should go on stepping to get the ranks' reports."""
        return self._steps < STEPS_MAX


class ForeignLoads:
    """Detect failed synchronous loads of other connectors.

    vLLM recomputes the blocks of a failed load, but may leave wrong ones in its prefix cache, where
    nothing tells them from good ones. Synchronous loads happen within the step that uses their
    blocks.
    """

    def __init__(self) -> None:
        self._last_step: int | None = None
        self.failed = False
        self.beside = False  # whether there are other connectors

    def scheduled(self, step: int, scheduler_output: Any) -> None:
        """Note a scheduled step.

        Our loads are asynchronous, so a synchronous one is another connector's.

        A vLLM release without `has_sync_kv_loads` may have such loads in every step.
        """
        if getattr(scheduler_output, "has_sync_kv_loads", self.beside):
            self._last_step = step

    def ran(self, step: int, invalid_blocks: Any) -> bool:
        """Return whether such a load failed.

        If our own load may be the cause as well, return True.
        """
        failed = bool(invalid_blocks) and self._last_step is not None and self._last_step >= step
        self.failed |= failed
        return failed


def shards_of(namespaces: Iterable[RankNamespaces]) -> list[list[Namespace]]:
    """Return for each cache group the namespaces of all shards, each once."""
    return [list(dict.fromkeys(itertools.chain(*group))) for group in zip(*namespaces, strict=True)]


def block_nbytes_of(namespaces: Iterable[RankNamespaces]) -> int:
    """Return the most bytes that one block has on one rank, in all its shards."""
    return max(
        sum(namespace.layout.page_nbytes for namespace in group)
        for rank in namespaces
        for group in rank
    )
