"""Convert nodes' replies to the dataclasses of `kvstore.results.replies`, and to JSON values.

Apart from `kvstore.messages`, so that clients import the dataclasses with their first reply.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.messages import namespace_message, namespace_value
from kvstore.results.replies import (
    CertificateStatus,
    Counters,
    DiskStatus,
    DrainProgress,
    Event,
    Events,
    FeedEvent,
    FeedModel,
    ForgetResult,
    GatewayEnd,
    GatewayStatus,
    HintCount,
    HintStatus,
    HostBlocks,
    IdentitiesStatus,
    Limits,
    LostMember,
    NamespaceInfo,
    NodeStatus,
    OperationTimes,
    PageStat,
    PeersStatus,
    PushedIdentities,
    QueryResult,
    RamStatus,
    Recorded,
    RecordedUse,
    RequestTimes,
    ScrubResult,
    ShmStatus,
    SizeClass,
    SweepResult,
    TenantUse,
    TlsStatus,
)

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# The dataclasses of messages that clients get, by the message's name.
RESULTS: dict[str, type[Any]] = {
    "NodeStatusReply": NodeStatus,
    "ForgetReply": ForgetResult,
    "ScrubReply": ScrubResult,
    "DrainReply": DrainProgress,
    "SweepReply": SweepResult,
    "RecordReply": Recorded,
    "EventsReply": Events,
    "PushIdentitiesReply": PushedIdentities,
} | {
    kind.__name__: kind
    for kind in (
        CertificateStatus,
        Counters,
        DiskStatus,
        Event,
        FeedModel,
        GatewayEnd,
        GatewayStatus,
        HintCount,
        HintStatus,
        IdentitiesStatus,
        Limits,
        LostMember,
        NamespaceInfo,
        OperationTimes,
        PageStat,
        PeersStatus,
        RamStatus,
        RecordedUse,
        RequestTimes,
        ShmStatus,
        SizeClass,
        TenantUse,
        TlsStatus,
    )
}
# They have no message
_OWN = (FeedEvent, HostBlocks, QueryResult)
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in (*RESULTS.values(), *_OWN)}
_SIMPLE = (bool, int, float, str, bytes)


def result(message: Any) -> Any:
    """Convert a message to its dataclass of `RESULTS`, with all messages inside it.

    Fields of newer nodes, which no dataclass has, are ignored, and so are repeated messages with a
    namespace that this version can not read. Raises InvalidRequest for a single one.
    """
    name = message.DESCRIPTOR.name
    if name == "Namespace":
        return namespace_value(message)
    kind = RESULTS[name]
    return kind(*[_result(getattr(message, field)) for field in _FIELDS[kind]])


def _result(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    return result(value) if hasattr(value, "DESCRIPTOR") else tuple(results(value))


def results(values: Iterable[Any]) -> Iterator[Any]:
    """Convert messages, without those of a namespace that this version can not read."""
    for value in values:
        try:
            yield _result(value)
        except InvalidRequest as error:
            log.warning("a namespace of a newer node is left out: %s", error)


def plain(value: Any) -> dict[str, Any]:
    """Convert a message or its dataclass to JSON values: every field, bytes as hex."""
    if isinstance(value, Namespace):
        value = namespace_message(value)
    names = _FIELDS.get(type(value)) or [field.name for field in value.DESCRIPTOR.fields]
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, _SIMPLE):
        return value
    if type(value) in _FIELDS or isinstance(value, Namespace) or hasattr(value, "DESCRIPTOR"):
        return plain(value)
    return [_plain(item) for item in value]
