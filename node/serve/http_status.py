"""Errors as HTTP tells them."""

from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)

_STATUS: tuple[tuple[type[KVStoreError], str], ...] = (
    (Unauthenticated, "401 Unauthorized"),
    (Forbidden, "403 Forbidden"),
    (UnknownNamespace, "404 Not Found"),
    (InvalidRequest, "400 Bad Request"),
    (Exhausted, "429 Too Many Requests"),
    (Unavailable, "503 Service Unavailable"),
    (DeadlineExceeded, "504 Gateway Timeout"),
)


def http_status(error: KVStoreError) -> str:
    found = (status for kind, status in _STATUS if isinstance(error, kind))
    return next(found, "500 Internal Server Error")
