"""How large a request of a kind may be: known from its length, before it is parsed.

Parsing keeps the GIL and makes up to a hundred bytes of each byte. So what no request that is served can need is
refused unparsed, and large ones are parsed one at a time.
"""

import threading
from typing import Any

from kvstore.checksum import LEAF_NBYTES, LEAF_SUM_NBYTES
from kvstore.config import GET_RANGES_MAX
from kvstore.errors import InvalidRequest
from kvstore.keys import PREFIX_HASH_NBYTES_MAX
from kvstore.messages import field_of
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.serve.limits import DESCRIPTION_NBYTES_MAX, REQUEST_NBYTES_FACTOR, REQUEST_NBYTES_FREE, Budget, Turns

_RANGE_WIRE_NBYTES = 24  # two numbers of ten bytes, their tags and a header
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
        self._parsing = threading.Lock()  # of large ones
        keys = config.batch_keys_max * (PREFIX_HASH_NBYTES_MAX + 2) + 1024
        leaves = config.batch_keys_max * (LEAF_SUM_NBYTES + 3) + config.batch_nbytes_max // LEAF_NBYTES * 8
        most = dict.fromkeys(("lookup", "put", "verify", "remove", "pin", "unpin", "stat"), keys)
        most |= {"get": keys + GET_RANGES_MAX * _RANGE_WIRE_NBYTES, "commit": leaves}
        most["open_namespace"] = 4 * DESCRIPTION_NBYTES_MAX
        self._nbytes_max = {op: max(most.get(op, 0), REQUEST_NBYTES_FREE) for op in _TYPES}

    def take(self, peer: str, nbytes: int) -> int:
        """What it takes from the budget for one of `nbytes`; the caller gives it back. Raises Exhausted."""
        taken = nbytes * REQUEST_NBYTES_FACTOR if nbytes > REQUEST_NBYTES_FREE else 0
        self._budget.take(peer, taken)
        return taken

    def parsed(self, op: str, data: bytes | memoryview, peer: str) -> Any:
        """The message, of a large one in its peer's turn. Raises InvalidRequest, or what protobuf raises if it is no
        such message."""
        if len(data) > self._nbytes_max[op]:
            raise InvalidRequest(
                f"a {op} of {len(data)} bytes; the largest that this node serves has {self._nbytes_max[op]}, "
                "split the batch (batch_keys_max)"
            )
        if len(data) <= REQUEST_NBYTES_FREE:
            return _TYPES[op][1].FromString(data)
        with self._turns.turn(peer), self._parsing:
            message = _TYPES[op][1].FromString(data)
            if op == "get" and len(message.ranges) > GET_RANGES_MAX:
                raise InvalidRequest(f"a get of {len(message.ranges)} ranges, at most {GET_RANGES_MAX}; split them")
            return message


def inside(header: bytes) -> tuple[str, memoryview]:
    """(op, its request) of a BulkRequest, which is one field and nothing else. Raises InvalidRequest."""
    number, request = field_of(memoryview(header))
    if number not in _OPS:
        raise InvalidRequest("a large request is one operation and nothing else")
    return _OPS[number], request
