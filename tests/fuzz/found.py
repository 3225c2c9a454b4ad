"""Inputs of former bugs, which are handled correctly now: (target, input, effect of the bug).

Each could come from outside and did harm: a node did not start, or a call of an engine raised an
undocumented exception.
"""

from inside import SPACE

from kvstore.messages import namespace_message

_DESCRIPTION = namespace_message(SPACE).SerializeToString()
_LINE = b'{"timestamp": 1, "input_length": %s, "output_length": 1, "hash_ids": [1]}'


def _space_row(key: bytes) -> bytes:
    return bytes((2, len(key))) + key + len(_DESCRIPTION).to_bytes(2, "little") + _DESCRIPTION


FOUND: list[tuple[str, bytes, str]] = [
    ("sizes, addresses", b"\0" + b"1e308t", "OverflowError out of parse_nbytes"),
    ("traces", _LINE % b"Infinity", "OverflowError out of read_trace"),
    (
        "member lists",
        b"static:fleet/n=\xcea:1",
        "UnicodeEncodeError at every hello: an address that is no text",
    ),
    ("member.json", b"[" * 3000, "RecursionError at the start"),
    ("extent names", "²".encode(), "ValueError at the start: a digit that is no number"),
    ("format rows", b"\xff5 0", "extents of no bytes, then ZeroDivisionError at the start"),
    ("format rows", "\xff5 ".encode("latin-1") + "²".encode(), "ValueError at the start"),
    (
        "disk rows",
        _space_row(b"\0\0\1") * 2,
        "OverflowError at the start: the number of a damaged row of a namespace",
    ),
    ("disk rows", _space_row(b"\0\0"), "a namespace of number 0, which is no number"),
    ("large requests", b"\0\0\0\0H\xa6\xae\xbe\xae\0", "an operation that protobuf does not find"),
]
