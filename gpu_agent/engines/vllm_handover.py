"""Read and write tickets in vLLM's `kv_transfer_params`, and tell what an engine's role may do.

prefill   {"do_remote_decode": true}, as NIXL's proxies send it, or {"kvstore.handover": true}
          answer: {"kvstore.ticket": {...}}, beside what other connectors answer
decode    {"kvstore.ticket": {...}}, as the proxy got it
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from vllm.config.kv_transfer import KVConsumer, KVProducer
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from gpu_agent.blocks.handover import Ticket, read_ticket
from gpu_agent.blocks.scheduler import BlockScheduler
from gpu_agent.engines.vllm_multi import enclosing_connectors
from kvstore.log_rate import LogRate

logger = init_logger("vllm.kvstore.handover")
logging.getLogger(logger.name).addFilter(LogRate())

ASKS, TICKET = "kvstore.handover", "kvstore.ticket"
# What other connectors' proxies send, to prefill and to decode
REMOTE_DECODE, REMOTE_PREFILL = "do_remote_decode", "do_remote_prefill"
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Role(NamedTuple):
    """Tell what an engine does with the store."""

    loads: bool
    saves: bool


def role_of(transfer: Any, connector: type) -> Role:
    """Return what our `kv_role` allows, and whether connectors around ours are consumers, too.

    With overlapping steps, vLLM lets a step still write blocks that it has freed, unless the
    engine is a consumer. A load into such blocks would be overwritten.
    """
    outer = [one._kv_transfer_config.kv_role for one in enclosing_connectors(connector)]
    loads = all(role in get_args(KVConsumer) for role in [transfer.kv_role, *outer])
    return Role(loads, saves=transfer.kv_role in get_args(KVProducer))


def ticket_of(request: Any, beside: bool) -> Ticket | None:
    """Return the ticket that a request brought; None without one, or with an invalid one.

    `beside`: there are other connectors. A prompt that one of them gets from the prefill engine is
    not waited for.
    """
    params = request.kv_transfer_params or {}
    fields = params.get(TICKET)
    if fields is None or (beside and params.get(REMOTE_PREFILL)):
        return None
    try:
        return read_ticket(fields)
    except ValueError as error:
        logger.warning("kvstore: request %s has an invalid ticket: %s", request.request_id, error)
        return None


def finish(
    scheduler: BlockScheduler, request: Any, tables: Sequence[list[int]]
) -> dict[str, Any] | None:
    """End a request and return what its answer carries: a ticket, if one was asked for."""
    params = request.kv_transfer_params or {}
    asks = params.get(ASKS, params.get(REMOTE_DECODE))
    if not asks or request.status not in COMPLETE:
        scheduler.finished(request, tables)
        return None
    # `MultiConnector` raises if two connectors answer under one name. Requests may share `params`.
    request.kv_transfer_params = {**params, ASKS: False}
    ticket = scheduler.hand_over(request, tables)
    return {TICKET: ticket.fields()} if ticket else None
