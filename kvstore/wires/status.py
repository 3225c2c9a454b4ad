"""Errors to and from the numeric codes of gRPC, which all wires carry."""

import grpc

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

# The one table. ConfigError is not in it: it ends a start and never travels.
_CODES: dict[type[KVStoreError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    ProtocolError: grpc.StatusCode.UNIMPLEMENTED,
}
_ERRORS: dict[int, type[KVStoreError]] = {code.value[0]: error for error, code in _CODES.items()}
_ERRORS[grpc.StatusCode.CANCELLED.value[0]] = Unavailable


def status_code(error: KVStoreError) -> grpc.StatusCode:
    """gRPC status of an error; INTERNAL for one outside the tree's leaves."""
    return _CODES.get(type(error), grpc.StatusCode.INTERNAL)


def from_status(code: int, message: str) -> KVStoreError:
    """The error of a numeric gRPC status, as a peer sent it."""
    error = _ERRORS.get(code, KVStoreError)(message)
    error.answered = True
    return error
