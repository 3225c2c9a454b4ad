"""What a check found, and what to do about it."""

import enum
from typing import NamedTuple

from kvstore.errors import Forbidden, KVStoreError, ProtocolError, Unauthenticated


class State(enum.Enum):
    OK = "ok"
    WARN = "warn"  # it works, and not as well as it could, or not for long
    FAIL = "fail"  # somebody has to do something
    SKIPPED = "skipped"  # it could not be looked at, or there is nothing to look at


class Finding(NamedTuple):
    """`remedy`: what to do; empty: nothing. `of`: the node that it is about, where there are several."""

    name: str
    state: State
    found: str
    remedy: str = ""
    of: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, State.OK, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, State.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, State.FAIL, found, remedy)


def skipped(name: str, why: str, remedy: str = "") -> Finding:
    return Finding(name, State.SKIPPED, why, remedy)


def remedy_of(error: KVStoreError, otherwise: str = "") -> str:
    """What to do about an error whose message does not say it."""
    if isinstance(error, Unauthenticated):
        return (
            "set KVSTORE_TOKEN_FILE, or KVSTORE_TLS_CERT and KVSTORE_TLS_KEY, to what the node's file of identities "
            "has, and has not let expire: kvstore tokens list shows it"
        )
    if isinstance(error, Forbidden):
        return "use a token whose role, tenant and models allow it: kvstore tokens list shows them"
    if isinstance(error, ProtocolError):
        return (
            "update the older of both: versions work together that are one step apart; or a node is not what is there"
        )
    return otherwise
