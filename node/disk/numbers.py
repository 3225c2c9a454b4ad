"""Short numbers for namespaces on disk: rows and records carry 2 bytes instead of a description."""

import itertools
from collections import Counter
from collections.abc import Callable

from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from node.disk.record_pool import RecordPool
from node.ram.accounts import Account

# Numbers have 16 bits, and a salt per request makes many namespaces: beyond this many, the numbers
# of those without pages are used again.
KEPT = 1 << 12


class NumberedSpaces:
    """A namespace has one number and one row. Not thread-safe; the disk tier's lock guards it. 0 is
    no number.

    `counts`: pages on disk by number. `new`: descriptions that are not in the rows yet.
    """

    def __init__(self, account_of: Callable[[str], Account[RecordPool]]) -> None:
        self._account_of = account_of
        self.accounts: dict[int, Account[RecordPool]] = {}  # of their tenants
        self.values: dict[int, Namespace] = {}
        self.counts: Counter[int] = Counter()
        self.new: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    def known(self, digest: bytes) -> int:
        return self._numbers.get(digest, 0)

    def restore(self, value: Namespace, number: int) -> bool:
        """A namespace that is in the rows; False for its second row, which can not be right."""
        if value.digest in self._numbers:
            return False
        self._numbers[value.digest], self.values[number] = number, value
        self.accounts[number] = self._account_of(value.tenant)
        return True

    def number(self, value: Namespace) -> int:
        """The namespace's number; that of a new one has to be written with the next rows."""
        number = self.known(value.digest)
        if not number:
            number = next(free for free in itertools.count(1) if free not in self.values)
            self.restore(value, number)
            self.new[number] = namespace_message(value).SerializeToString()
        return number

    def take_new(self) -> dict[int, bytes]:
        new, self.new = self.new, {}
        return new

    @property
    def crowded(self) -> bool:
        return len(self.values) >= KEPT

    def drop_empty(self) -> list[int]:
        """Forgets namespaces without pages. Their rows must go no later than one of them gets another
        number: a namespace with two would have its pages under the one that is not asked."""
        empty = [number for number in self.values if not self.counts[number]]
        for number in empty:
            del self._numbers[self.values.pop(number).digest]
            del self.counts[number], self.accounts[number]
            self.new.pop(number, None)
        return empty
