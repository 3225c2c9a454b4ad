"""Short numbers for namespaces on disk: rows and records carry 2 bytes instead of a description."""

import itertools
from collections import Counter
from collections.abc import Callable

from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.messages import namespace_message, parse_namespace
from node.disk.record_pool import RecordPool
from node.disk.rows import namespace_key
from node.disk.vault import PLAIN, Vault
from node.ram.accounts import Account

# Numbers have 16 bits, and a salt per request makes many namespaces: beyond this many, the numbers
# of those without pages are used again.
KEPT = 1 << 12


class NumberedSpaces:
    """A namespace has one number and one row. Not thread-safe; the disk tier's lock guards it. 0 is
    no number.

    `keys`: of their pages, by number, each empty if they are plain. `counts`: pages on disk by number. `new`: what
    is not in the rows yet.
    """

    def __init__(self, account_of: Callable[[str], Account[RecordPool]], vault: Vault = PLAIN) -> None:
        self._account_of = account_of
        self.accounts: dict[int, Account[RecordPool]] = {}  # of their tenants
        self._vault = vault
        self.values: dict[int, Namespace] = {}
        self.keys: dict[int, bytes] = {}
        self.counts: Counter[int] = Counter()
        self.new: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    @property
    def encrypted(self) -> bool:
        return bool(self._vault.mark)

    def known(self, digest: bytes) -> int:
        return self._numbers.get(digest, 0)

    def restore(self, number: int, row: bytes) -> str:
        """A namespace that is in the rows; why that can not be, if so."""
        try:
            key, description = self._vault.unwrap(namespace_key(number), row)
            value = parse_namespace(description)
        except InvalidRequest as error:
            return str(error)
        if value.digest in self._numbers:
            return f"it is the second one of namespace {value.digest.hex()}"
        self._add(value, number, key)
        return ""

    def _add(self, value: Namespace, number: int, key: bytes) -> None:
        self._numbers[value.digest], self.values[number], self.keys[number] = number, value, key
        self.accounts[number] = self._account_of(value.tenant)

    def number(self, value: Namespace) -> int:
        """The namespace's number; that of a new one has to be written with the next rows."""
        number = self.known(value.digest)
        if not number:
            number = next(free for free in itertools.count(1) if free not in self.values)
            key = self._vault.new_key()
            self._add(value, number, key)
            description = namespace_message(value).SerializeToString()
            self.new[number] = self._vault.wrap(namespace_key(number), key, description)
        return number

    def take_new(self) -> dict[int, bytes]:
        new, self.new = self.new, {}
        return new

    @property
    def crowded(self) -> bool:
        return len(self.values) >= KEPT

    def drop(self, number: int) -> None:
        """Forgets a namespace without pages; as `drop_empty` does it."""
        del self._numbers[self.values.pop(number).digest]
        del self.counts[number], self.keys[number], self.accounts[number]
        self.new.pop(number, None)

    def drop_empty(self) -> list[int]:
        """Forgets namespaces without pages. Their rows must go no later than one of them gets another
        number: a namespace with two would have its pages under the one that is not asked."""
        empty = [number for number in self.values if not self.counts[number]]
        for number in empty:
            self.drop(number)
        return empty
