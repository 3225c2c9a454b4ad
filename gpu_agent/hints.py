"""Read what a request says about its pages' future, in the engines' words.

    kv_transfer_params   kvstore.session, .priority, .ttl_s, .pin_s, .tiers, .ended
    KvHintsEnvelope      vLLM: actions `retain`, `pin`, `demote` and `delete`, whose payload has the
                         same words without `kvstore.`
    retention ranges     TensorRT-LLM: `ranges` of a payload, each with token_start, token_end,
                         priority and duration_ms

Hints are wishes of a client that the engine does not know. A wrong or unknown one is left out,
never an error of the request.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvstore.results.hints import (
    PRIORITY_DEFAULT,
    PRIORITY_HIGH,
    PRIORITY_MAX,
    SESSION_NBYTES_MAX,
    Hint,
    HintAction,
)

PREFIX = "kvstore."
WORDS = ("session", "priority", "ttl_s", "pin_s", "tiers", "ended", "ranges")
RETAIN_S = 600.0  # for a priority without a time
RANGES_MAX = 64  # of all actions together
ACTIONS_MAX = 64


class Retention(NamedTuple):
    """A priority for the tokens from `start` to before `end`, for some seconds."""

    priority: int
    ttl_s: float
    start: int = 0
    end: float = math.inf


class RequestHints(NamedTuple):
    """Describe what a request says about its pages.

    `demote`: they are wanted on disk only. `ended`: its session is over with this request.
    """

    session: str = ""
    retentions: tuple[Retention, ...] = ()
    pin_s: float = 0.0
    demote: bool = False
    ended: bool = False

    def of_pages(self, tokens: Iterable[int], age_s: float = 0.0) -> "list[tuple[Hint, list[int]]]":
        """Return the hints to send, each with the positions of its pages.

        `tokens`: a token of each page, such as its last, by which a range has the page. `age_s`: of
        the session.
        """
        tokens = list(tokens)
        every = list(range(len(tokens)))
        named: dict[str, Any] = {"session": self.session, "session_age_s": age_s}
        found: list[tuple[Hint, list[int]]] = []
        if self.ended and self.session:
            found.append((Hint(HintAction.RETAIN, 0, RETAIN_S, **named), every))
        for (priority, ttl_s), some in () if self.ended else self._retained(tokens):
            found.append((Hint(HintAction.RETAIN, priority, ttl_s, **named), some))
        if self.session and not found:
            found.append((Hint(HintAction.NAME, **named), every))
        if self.pin_s:
            found.append((Hint(HintAction.PIN, ttl_s=self.pin_s, **named), every))
        if self.demote:
            found.append((Hint(HintAction.DEMOTE, **named), every))
        return [(hint, some) for hint, some in found if some]

    def _retained(self, tokens: Sequence[int]) -> list[tuple[tuple[int, float], list[int]]]:
        """Return the pages of each priority and time; of ranges that overlap the last one holds."""
        chosen: list[tuple[int, float] | None] = [None] * len(tokens)
        found: dict[tuple[int, float] | None, list[int]] = {}
        for priority, ttl_s, start, end in self.retentions:
            found[priority, ttl_s] = []
            for at, token in enumerate(tokens):
                if start <= token < end:
                    chosen[at] = priority, ttl_s
        for at, each in enumerate(chosen):
            found.setdefault(each, []).append(at)
        return [(each, some) for each, some in found.items() if each is not None]


NOTHING = RequestHints()


def request_hints(
    params: Mapping[str, Any] | None, envelope: Any = None, session: str | None = None
) -> RequestHints:
    """Return what a request says; NOTHING without a word.

    `params`: its kv_transfer_params. `envelope`: its KvHintsEnvelope. `session`: the engine's own
    id of the request's session. The envelope is read last, so what it says holds.
    """
    found = _read(NOTHING._replace(session=_session(session)), _ours(params or {}), ())
    for action in islice(getattr(envelope, "actions", None) or (), ACTIONS_MAX):
        payload = getattr(action, "payload", None)
        name = str(getattr(action, "action_type", "")).lower()
        if isinstance(payload, Mapping) and name in ("retain", "pin", "demote", "delete"):
            found = _read(found, payload, (name,))
    return found


def _ours(params: Mapping[str, Any]) -> dict[str, Any]:
    return {word: params[PREFIX + word] for word in WORDS if PREFIX + word in params}


def _read(found: RequestHints, words: Mapping[str, Any], actions: tuple[str, ...]) -> RequestHints:
    """Add what some words say, of an action or of none in particular."""
    found = found._replace(session=_session(words.get("session")) or found.session)
    ttl_s, priority = _seconds(words.get("ttl_s")), _priority(words.get("priority"))
    if "pin" in actions:
        found = found._replace(pin_s=ttl_s or found.pin_s)
    elif ttl_s or priority is not None:
        retention = Retention(PRIORITY_HIGH if priority is None else priority, ttl_s or RETAIN_S)
        found = found._replace(retentions=(*found.retentions, retention))
    ranges = words.get("ranges")
    if isinstance(ranges, list):
        room = max(0, RANGES_MAX - len(found.retentions))
        some = (_range(each) for each in ranges[:room] if isinstance(each, Mapping))
        found = found._replace(retentions=(*found.retentions, *filter(None, some)))
    tiers = words.get("tiers")
    demote = "demote" in actions or tiers in ("disk", ["disk"])
    return found._replace(
        pin_s=_seconds(words.get("pin_s")) or found.pin_s,
        demote=demote or found.demote,
        ended="delete" in actions or words.get("ended") is True or found.ended,
    )


def _range(words: Mapping[str, Any]) -> Retention | None:
    priority, start, end = (
        words.get("priority"),
        words.get("token_start", 0),
        words.get("token_end"),
    )
    if not isinstance(start, int) or not isinstance(end, int | None):
        return None
    known = _priority(priority)
    return Retention(
        PRIORITY_DEFAULT if known is None else known,
        _seconds(words.get("duration_ms")) / 1000 or RETAIN_S,
        start,
        math.inf if end is None else end,
    )


def _session(value: Any) -> str:
    if not isinstance(value, str) or len(value) > SESSION_NBYTES_MAX or not value.isprintable():
        return ""
    return value if len(value.encode()) <= SESSION_NBYTES_MAX else ""


def _seconds(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e9 else 0.0


def _priority(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= PRIORITY_MAX else None
