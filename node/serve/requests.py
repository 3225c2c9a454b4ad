"""How large a request of a kind may be: known from its length, and of a get from its fields, before it is parsed.

Parsing keeps the GIL, 60 ms for 2 MiB of empty ranges, and makes 24 bytes of each byte. So what no request that is
served can need is refused unparsed, and what is large is gone through in Python, where others have their turn.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.checksum import LEAF_NBYTES, LEAF_SUM_NBYTES
from kvstore.config import GET_PIECES_MAX
from kvstore.errors import InvalidRequest
from kvstore.keys import PREFIX_HASH_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.serve.limits import DESCRIPTION_NBYTES_MAX, REQUEST_NBYTES_FACTOR, REQUEST_NBYTES_FREE, Budget, Turns

RANGE_NBYTES = 192  # of memory, parsed and as numbers
_RANGE_WIRE_NBYTES = 24  # two numbers of ten bytes, their tags and a header
_DELIMITED, _RANGES = 2, pb.GetRequest.RANGES_FIELD_NUMBER
_FIXED_NBYTES = {1: 8, 5: 4}  # by wire type
_TYPES = {
    field.name: (field.number, getattr(pb, field.message_type.name))
    for field in pb.BulkRequest.DESCRIPTOR.fields
    if field.message_type
}
_OPS = {number: op for op, (number, _) in _TYPES.items()}


class Requests:
    """`op` is the field's name in BulkRequest; `data` the request in its wire form. Thread-safe."""

    def __init__(self, config: NodeConfig, budget: Budget, turns: Turns) -> None:
        self._budget = budget
        self._turns = turns
        keys = config.batch_keys_max * (PREFIX_HASH_NBYTES_MAX + 2) + 1024
        leaves = config.batch_keys_max * (LEAF_SUM_NBYTES + 3) + config.batch_nbytes_max // LEAF_NBYTES * 8
        self._fields_max = GET_PIECES_MAX + config.batch_keys_max + 64
        most = dict.fromkeys(("lookup", "put", "verify", "remove", "pin", "unpin", "stat"), keys)
        most |= {"get": keys + GET_PIECES_MAX * _RANGE_WIRE_NBYTES, "commit": leaves}
        most["open_namespace"] = 4 * DESCRIPTION_NBYTES_MAX
        self._nbytes_max = {op: max(most.get(op, 0), REQUEST_NBYTES_FREE) for op in _TYPES}

    def check_nbytes(self, op: str, nbytes: int) -> None:
        """Raises InvalidRequest; takes no time."""
        if nbytes > self._nbytes_max[op]:
            raise InvalidRequest(
                f"a {op} of {nbytes} bytes; the largest that this node serves has {self._nbytes_max[op]}, "
                "split the batch (batch_keys_max)"
            )

    def ranges(self, op: str, data: memoryview) -> int:
        """How many ranges a large get has. Raises InvalidRequest if they can not be right. Others run meanwhile."""
        if op != "get" or data.nbytes <= REQUEST_NBYTES_FREE:
            return 0
        at, fields, ranges = 0, 0, 0
        while at < data.nbytes:
            number, nbytes, at = _field(data, at)
            at += nbytes
            fields += 1
            ranges += number == _RANGES
            if fields > self._fields_max:
                raise InvalidRequest(f"a get of more than {GET_PIECES_MAX} pieces; split the batch")
        return ranges

    def take(self, peer: str, nbytes: int) -> int:
        """What it takes from the budget for one of `nbytes`; the caller gives it back. Raises Exhausted."""
        taken = nbytes * REQUEST_NBYTES_FACTOR if nbytes > REQUEST_NBYTES_FREE else 0
        self._budget.take(peer, taken)
        return taken

    @contextlib.contextmanager
    def lent(self, peer: str, op: str, nbytes: int) -> Iterator[None]:
        """Raises Exhausted, and InvalidRequest for one that is too large for its kind."""
        taken = self.take(peer, nbytes)
        try:
            self.check_nbytes(op, nbytes)
            yield
        finally:
            self._budget.give(peer, taken)

    def parsed(self, op: str, data: bytes | memoryview, peer: str, took: Callable[[int], object]) -> Any:
        """The message, of a large one in its peer's turn. `took` is told what it takes from the budget besides, which
        the caller gives back. Raises InvalidRequest, Exhausted, or what protobuf raises if it is no such message."""
        self.check_nbytes(op, len(data))
        if len(data) <= REQUEST_NBYTES_FREE:
            return _TYPES[op][1].FromString(data)
        with self._turns.turn(peer):
            taken = self.ranges(op, memoryview(data)) * RANGE_NBYTES
            self._budget.take(peer, taken)
            took(taken)
            return _TYPES[op][1].FromString(data)


def inside(header: bytes) -> tuple[str, memoryview]:
    """(op, its request) of a BulkRequest, which is one field and nothing else. Raises InvalidRequest."""
    data = memoryview(header)
    number, nbytes, start = _field(data, 0)
    if number not in _OPS or header[0] & 7 != _DELIMITED or start + nbytes != data.nbytes:
        raise InvalidRequest("a large request is one operation and nothing else")
    return _OPS[number], data[start:]


def _field(data: memoryview, at: int) -> tuple[int, int, int]:
    """(its number, bytes of its value, where that begins)."""
    tag, at = _varint(data, at)
    kind = tag & 7
    if kind == _DELIMITED:
        nbytes, at = _varint(data, at)
    elif kind:
        nbytes = _FIXED_NBYTES.get(kind, data.nbytes)  # of an unknown kind: refused
    else:
        nbytes = _varint(data, at)[1] - at
    if at + nbytes > data.nbytes:
        raise InvalidRequest("a request that is no message of the schema")
    return tag >> 3, nbytes, at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    for end, byte in enumerate(data[at : at + 10], at + 1):
        value |= (byte & 127) << shift
        if byte < 128:
            return value, end
        shift += 7
    raise InvalidRequest("a request that is no message of the schema")
