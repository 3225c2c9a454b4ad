"""The error classes, and their mapping to and from wire codes."""

import grpc
import pytest

from kvstore import errors
from kvstore.errors import ConfigError, KVStoreError, Unavailable
from kvstore.transports.status import Code, from_status, status_code

LEAVES = KVStoreError.__subclasses__()


def test_error_tree_is_small_and_documented() -> None:
    assert len(LEAVES) <= 10
    finer = [
        some
        for leaf in LEAVES
        for some in leaf.__subclasses__()
        if some.__module__ == errors.__name__
    ]
    assert not finer, "an error for one file only must be defined in that file"
    assert all(leaf.__name__ in (errors.__doc__ or "") for leaf in LEAVES)


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf is not ConfigError])
def test_error_survives_the_wire(leaf: type[KVStoreError]) -> None:
    code = status_code(leaf("why"))
    again = from_status(code, "why")
    assert (type(again), str(again)) == (leaf, "why")


def test_codes_are_distinct() -> None:
    codes = [status_code(leaf("")) for leaf in LEAVES]
    assert len(set(codes)) == len(LEAVES)


def test_codes_equal_those_of_grpc() -> None:
    assert {code.name: code.value for code in Code} == {
        code.name: code.value[0] for code in grpc.StatusCode if code.name in Code.__members__
    }


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS]
)
def test_internal_error_of_the_node_is_a_plain_kvstore_error(
    code: grpc.StatusCode,
) -> None:
    assert type(from_status(code.value[0], "bug")) is KVStoreError


def test_cancelled_call_is_unavailable() -> None:
    assert type(from_status(grpc.StatusCode.CANCELLED.value[0], "")) is Unavailable


def test_unknown_code_is_a_kvstore_error() -> None:
    assert type(from_status(4711, "?")) is KVStoreError
