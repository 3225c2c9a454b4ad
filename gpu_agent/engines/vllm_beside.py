"""Beside other connectors: what vLLM's `MultiConnector` does to a connector, and how ours copes with it.

    alone               get_handshake_metadata ---> set_xfer_handshake_metadata      before the first request
    in MultiConnector   reports of all ranks (worker metadata) ---> `HeldByRanks`    after the first step

`MultiConnector` passes on the first handshake metadata that one of its connectors has, and gives it to all of them.
NIXL raises when it gets ours. So ours has none there, ignores what it does not know, and the ranks tell in their
reports what they hold until the scheduler's side has said that it knows.
"""

import contextlib
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from gpu_agent.engines.vllm_metadata import Held, RankId
from kvstore.keys import Namespace

# Of an idle engine, so that its first request finds the ranks heard: a rank without a store is never heard of.
STEPS_MAX = 64


def asked_by_another(connector: type) -> bool:
    """Whether a method of `connector`, our caller, was called from a method of another connector, which contains ours.

    vLLM gives a connector in `MultiConnector` a configuration of its own that does not name the outer one, so the
    callers are all there is to tell: all of them, since a wrapper or a generator may be between. Those that are not
    recognised count as vLLM itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        caller = names.get("self", names.get("cls"))
        kind = caller if isinstance(caller, type) else type(caller)
        if issubclass(kind, KVConnectorBase_V1) and not issubclass(kind, connector):
            return True
        frame = frame.f_back
    return False


def register(connector: type[KVConnectorBase_V1]) -> None:
    """Let vLLM find the class by its name: `MultiConnector` rebuilds statistics of its connectors so, and raises for
    a name that is not registered."""
    with contextlib.suppress(ValueError):  # it is
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


class HeldByRanks:
    """The scheduler's side: what the ranks of an engine hold, as far as they have told. Requests that came before
    that are remembered."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._held: dict[RankId, Held] = {}
        self._steps = 0
        self.requests: dict[str, Any] = {}

    def add(self, held: Mapping[RankId, Held]) -> list[Held] | None:
        """What all ranks hold, once all have told."""
        self._held.update(held)
        return [held for _, held in sorted(self._held.items())] if len(self._held) >= self._ranks else None

    def stepped(self) -> None:
        self._steps += 1

    @property
    def waiting(self) -> bool:
        """Whether an idle engine should step to hear the ranks."""
        return self._steps < STEPS_MAX


class OthersLoads:
    """Loads of other connectors that end within the step that computes over their blocks. Where one fails, vLLM
    computes the blocks again, but may keep what is wrong in its prefix cache, where it looks like any other KV."""

    def __init__(self) -> None:
        self._last_step: int | None = None
        self.failed = False
        self.beside = False  # there are other connectors

    def scheduled(self, step: int, scheduler_output: Any) -> None:
        """A step was planned. Ours run beside steps, so a load within one is another connector's. A release of vLLM
        that does not tell may have such loads in every step."""
        if getattr(scheduler_output, "has_sync_kv_loads", self.beside):
            self._last_step = step

    def ran(self, step: int, invalid_blocks: Any) -> bool:
        """Whether such a load failed; of a step whose blocks both kinds of loads could have left invalid, yes."""
        failed = bool(invalid_blocks) and self._last_step is not None and self._last_step >= step
        self.failed |= failed
        return failed


def shards_of(held: Iterable[Held]) -> list[list[Namespace]]:
    """Per cache group the namespaces of all ranks, each once."""
    return [list(dict.fromkeys(filter(None, group))) for group in zip(*held, strict=True)]
