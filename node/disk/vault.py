"""Keys of the disk tier.

    the operator's key (a file, or what a command prints)
        wraps    in the row of each namespace: its description and its page key
                     which encrypts the bytes of its pages (`node.disk.seal`)

Who destroys that row has erased the namespace. Without the operator's key all is plain: `PLAIN`.
"""

import hashlib
from typing import Protocol

from kvstore.errors import ConfigError, InvalidRequest
from node.disk import cipher

MARK_NBYTES = 4  # of a key: tells operators which one it is, and nothing about it
_MARK_LABEL = b"kvstore-disk-key-1\0"


class Vault(Protocol):
    """`mark` tells one operator's key from another, hex; empty: nothing is encrypted."""

    mark: str

    def new_key(self) -> bytes:
        """For the pages of a new namespace; empty: they are plain."""

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        """What the row of a namespace has."""

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """(page key, description). Raises InvalidRequest for what it did not wrap."""


class Plain:
    mark = ""

    def new_key(self) -> bytes:
        return b""

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        return description

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        return b"", value


PLAIN = Plain()


class Locked:
    """Under the operator's key. Raises ConfigError if `cryptography` is too old."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == cipher.WRAPPING_KEY_NBYTES
        if not cipher.works():
            raise ConfigError("the installed package `cryptography` can not do AES-256-XTS in place; update it")
        self.mark = hashlib.sha256(_MARK_LABEL + key).digest()[:MARK_NBYTES].hex()
        self._key = key

    def new_key(self) -> bytes:
        return cipher.new_page_key()

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        return cipher.wrap(self._key, page_key + description, row_key)

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        secret = cipher.unwrap(self._key, value, row_key)
        if secret is None or len(secret) < cipher.PAGE_KEY_NBYTES:
            raise InvalidRequest("its wrapped key is damaged")
        return secret[: cipher.PAGE_KEY_NBYTES], secret[cipher.PAGE_KEY_NBYTES :]
