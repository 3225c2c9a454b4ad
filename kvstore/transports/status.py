"""Convert errors to and from numeric gRPC codes, which all transports carry.

Frames need no gRPC package for them.
"""

import enum

from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)


class Code(enum.IntEnum):
    """The gRPC status codes that a node answers with, by gRPC's names and numbers."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


# The only table. ConfigError is not in it: it ends a start and is never sent.
_CODES: dict[type[KVStoreError], Code] = {
    InvalidRequest: Code.INVALID_ARGUMENT,
    UnknownNamespace: Code.NOT_FOUND,
    LayoutMismatch: Code.FAILED_PRECONDITION,
    Exhausted: Code.RESOURCE_EXHAUSTED,
    Unavailable: Code.UNAVAILABLE,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    Unauthenticated: Code.UNAUTHENTICATED,
    Forbidden: Code.PERMISSION_DENIED,
    ProtocolError: Code.UNIMPLEMENTED,
}
_ERRORS: dict[int, type[KVStoreError]] = {code: error for error, code in _CODES.items()}
_ERRORS[Code.CANCELLED] = Unavailable


def status_code(error: KVStoreError) -> Code:
    """Return the gRPC status code of an error; INTERNAL for unknown kinds."""
    return _CODES.get(type(error), Code.INTERNAL)


def from_status(code: int, message: str) -> KVStoreError:
    """Return the error for a numeric gRPC status that a peer sent."""
    error = _ERRORS.get(code, KVStoreError)(message)
    error.answered = True
    return error
