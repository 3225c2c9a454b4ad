"""Encode events: vLLM's KV events, and the stream of Mooncake's store that Dynamo reads.

    vLLM      [ts, [event...], dp_rank]; an event is a map with `type`
    Mooncake  [ts_ms, [event...], dp_rank]; an event is a map with `event_type` and `object_key`

Read in vLLM 0.33 (`distributed/kv_events.py`), SGLang 0.5.23, Mooncake (RFC 1527) and Dynamo
(`lib/llm/src/kv_router/shared_cache.rs`) in November 2026.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgpack

from kvstore.errors import InvalidRequest

Event = dict[str, Any]
_NOT_IN_TOPICS = re.compile(r"[@\s\x00-\x1f]")
_BITS, _HIGH = 64, 1 << 63
ENTRIES_MAX = 1_000_000  # objects and blocks that Dynamo remembers
GROUP = "sglang-hicache:"  # what Dynamo puts before the first part of an object's name


def _signed(number: int) -> int:
    return number - (1 << _BITS) if number >= _HIGH else number


# How engines name blocks in their events; routers must see the same names from both.
FORMS: Mapping[str, Callable[[bytes], bytes | int]] = {
    "bytes": lambda key: key,  # vLLM
    "low64": lambda key: int.from_bytes(
        key[-8:], "big"
    ),  # with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    "sglang": lambda key: _signed(int.from_bytes(key[:8], "big")),
}


class Wire(Protocol):
    """Makes the events of a stream.

    `gap_clears`: readers forget all when a number is missing. `blocks_max`: readers forget all when
    they know more blocks; 0: they do not.
    """

    topic: bytes
    gap_clears: bool
    blocks_max: int

    def cleared(self) -> list[Event]:
        """Return the events after which nothing is stored."""

    def stored(self, block_tokens: int, hashes: Sequence[bytes]) -> list[Event]:
        """Return the events that these blocks are stored."""

    def removed(self, hashes: Sequence[bytes]) -> list[Event]:
        """Return the events that these blocks are stored no longer."""

    def packed(self, events: Sequence[Event]) -> bytes:
        """Return the message of these events."""


class VllmWire:
    """vLLM's events: blocks without tokens, which routers know by their hashes from engines."""

    gap_clears = False
    blocks_max = 0

    def __init__(self, pool: str, model: str, form: str = "bytes", medium: str = "STORAGE") -> None:
        """Prepare the topic kv@pool:POOL@MODEL, which credits every engine. Raises InvalidRequest.

        `form`: of `FORMS`.
        """
        if not pool or _NOT_IN_TOPICS.search(pool) or _NOT_IN_TOPICS.search(model):
            raise InvalidRequest(
                f"pool {pool[:60]!r} and model {model[:60]!r} are parts of a topic, kv@pool:POOL@"
                "MODEL: they may contain neither @ nor blanks"
            )
        if form not in FORMS:
            raise InvalidRequest(f"hashes {form[:40]!r} is not one of {', '.join(FORMS)}")
        self.topic = f"kv@pool:{pool}@{model}".encode()
        self._form = FORMS[form]
        self._where = {"medium": medium, "locality": "REMOTE", "ownership": pool}

    def cleared(self) -> list[Event]:
        """Return AllBlocksCleared."""
        return [{"type": "AllBlocksCleared"}]

    def stored(self, block_tokens: int, hashes: Sequence[bytes]) -> list[Event]:
        """Return one BlockStored."""
        return [
            {
                "type": "BlockStored",
                "block_hashes": [self._form(key) for key in hashes],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": block_tokens,
                "lora_id": None,
                "lora_name": None,
                **self._where,
            }
        ]

    def removed(self, hashes: Sequence[bytes]) -> list[Event]:
        """Return one BlockRemoved."""
        names = [self._form(key) for key in hashes]
        return [{"type": "BlockRemoved", "block_hashes": names, **self._where}]

    def packed(self, events: Sequence[Event]) -> bytes:
        """Return the message; the store is no data-parallel rank."""
        return bytes(msgpack.packb([time.time(), events, None]))


class MooncakeWire:
    """Mooncake's events: one for each object that Dynamo expects of a block."""

    topic = b""
    gap_clears = True  # Dynamo reads no `cleared`

    def __init__(
        self, pool: str, model: str, tenant: str, objects: Sequence[str], group: str = ""
    ) -> None:
        """Prepare the stream. Raises InvalidRequest for a template without {hash}.

        `objects`: names of the objects of a block. `group`: name of the block; empty: Dynamo's for
        such objects. By it Dynamo finds a block at once that it found by its objects before.
        """
        head, _, _ = objects[0].partition("{hash}")
        group = group or f"{GROUP}{head}{{hash}}"
        for template in (*objects, group):
            if template.count("{hash}") != 1:
                raise InvalidRequest(f"{template[:60]!r} must contain {{hash}} once")
        self._objects, self._group = tuple(objects), group
        self.blocks_max = ENTRIES_MAX // (len(self._objects) + 1)
        self._about = {"model_name": model, "tenant_id": tenant, "backend_id": pool}
        self._event_id = -len(self._objects)
        self.packed(self.stored(1, [b""]))  # raises now for a text that can not be encoded

    def cleared(self) -> list[Event]:
        """Return RFC 1527's `cleared`, which Dynamo does not read."""
        return [self._event("cleared")]

    def stored(self, block_tokens: int, hashes: Sequence[bytes]) -> list[Event]:
        """Return an event for each object."""
        return self._of_objects("stored", hashes, block_size=block_tokens, token_ids=None)

    def removed(self, hashes: Sequence[bytes]) -> list[Event]:
        """Return an event for each object."""
        return self._of_objects("removed", hashes)

    def packed(self, events: Sequence[Event]) -> bytes:
        """Return the message."""
        return bytes(msgpack.packb([round(1000 * time.time()), events, 0]))

    def _of_objects(self, kind: str, hashes: Sequence[bytes], **more: Any) -> list[Event]:
        return [
            self._event(
                kind,
                object_key=template.replace("{hash}", key.hex()),
                group_id=self._group.replace("{hash}", key.hex()),
                seq_hashes=[],
                **more,
            )
            for key in hashes
            for template in self._objects
        ]

    def _event(self, kind: str, **more: Any) -> Event:
        self._event_id += 1
        return {"event_id": self._event_id, "event_type": kind, **self._about, **more}
