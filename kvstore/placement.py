"""Which node owns a key. Pure: no I/O, no clock."""

from typing import Protocol


class Placement(Protocol):
    """A mapping of keys to node addresses that every client computes alike."""

    @property
    def nodes(self) -> tuple[str, ...]: ...

    def owner(self, key: bytes) -> str: ...


class SingleNode:
    """All keys on one node."""

    def __init__(self, address: str) -> None:
        self._address = address

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self._address,)

    def owner(self, key: bytes) -> str:
        return self._address
