"""Messages made of numbers that other threads change meanwhile, or that come from clocks: each number is
brought into its field's range, because a message refuses one that is not."""

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

Message = TypeVar("Message")

_LIMITS: dict[type, dict[str, int]] = {}


def in_range(kind: type[Message], **fields: Any) -> Message:
    """A message; an age that would be negative is 0."""
    limits = _LIMITS.get(kind) or _LIMITS.setdefault(kind, _unsigned(kind))
    for name, largest in limits.items():
        if not 0 <= fields.get(name, 0) <= largest:
            fields[name] = min(max(0, fields[name]), largest)
    return kind(**fields)


def _unsigned(kind: Any) -> dict[str, int]:
    """The largest value of each unsigned field that is not repeated. (A descriptor's `label` is gone in protobuf 7, and
    its constants came with 4.25: `make test-protobuf`.)"""
    empty = kind()
    largest = {FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1, FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1}
    return {
        field.name: largest[field.cpp_type]
        for field in kind.DESCRIPTOR.fields
        if field.cpp_type in largest and isinstance(getattr(empty, field.name), int)
    }
