"""Tell the store what vLLM's requests say about their pages' future (`gpu_agent/hints.py`)."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.logger import init_logger

from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.blocks.scheduler import BlockScheduler
from gpu_agent.hint_sender import HintSender
from gpu_agent.hints import NOTHING, RequestHints, request_hints
from kvstore.log_rate import LogRate

log = init_logger("vllm.kvstore.hints")
logging.getLogger(log.name).addFilter(LogRate())

# After the end of a request, whose last pages may not be stored yet
AFTER_S = (0.25, 2.0)


def hints_of(request: Any) -> RequestHints:
    """Return what a request, or a tier's context of one, says; vLLM 0.32 has no envelope."""
    params, envelope = request.kv_transfer_params, getattr(request, "kv_hints", None)
    return request_hints(params, envelope) if params or envelope is not None else NOTHING


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:  # vLLM's scheduler, and with it all requests, would end
        log.exception("kvstore: the hints of a request are lost")


class RequestHinter:
    """Send the hints of requests when they end: of all their pages, loaded and saved.

    Used by the scheduler's thread.
    """

    def __init__(
        self, scheduler: BlockScheduler, lookups: Lookups, groups: Sequence[BlockGroup]
    ) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._sender = HintSender(lookups.hint, AFTER_S)

    def begin(self, request: Any) -> None:
        """Note the session of a new request."""
        with _harmless():
            self._sender.begin(hints_of(request))

    def finish(self, request: Any) -> None:
        """Send what a request says, and end its session if it was the last."""
        with _harmless():
            self._finish(request)

    def _finish(self, request: Any) -> None:
        if (said := hints_of(request)) == NOTHING:
            return
        pages = self._scheduler.question(request)
        ends = [
            range(group.block_tokens - 1, len(keys) * group.block_tokens, group.block_tokens)
            for group, (_, keys) in zip(self._groups, pages, strict=True)
        ]
        self._sender.send(said, pages, ends)
        self._sender.end(said, [namespaces for namespaces, _ in pages])
