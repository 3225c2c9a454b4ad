"""Encrypt the disk tier, with `cryptography`.

    the operator's key (a file, or the output of a command)
        wraps    in the row of each namespace: its description and its page key
                     which encrypts the bytes of its pages

    units of a page    AES-256-XTS: as long as the plain text; any change decrypts to noise
    wrapped keys       AES-256-GCM with a random nonce: a changed or moved row is detected

Deleting that row erases the namespace. Without the operator's key nothing is encrypted: `PLAIN`.
The key is never logged, and errors contain at most its length.

Both ciphers release the GIL for large data. XTS takes 7 µs a unit and 0.1 ms a MiB
(docs/decisions/0030). Encryption of a page on disk:

    slot     | unit 0: 1 MiB | unit 1 | ... | the rest     |       each encrypted by itself
    tweak    location of the unit on disk u64 (x 4 KiB) | first 8 bytes of the page's checksum

The smallest part of a page that is read begins at a whole MiB and ends at another, or at the slot's
end (`node.memory.promotion`), so every read is of whole units. The checksum covers the plain bytes
and the page's key: a slot that is written again gets other tweaks, and its content reveals nothing
about its earlier content.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import selectors
import shlex
import stat
import subprocess
import time
from typing import NamedTuple, Protocol

with contextlib.suppress(ModuleNotFoundError):  # a node without keys needs none
    from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import XTS

from kvstore.checksum import LEAF_NBYTES
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.layout import SLOT_ALIGN_NBYTES
from kvstore.security.secrets import SECRET_NBYTES_MAX, read_guarded

WRAPPING_KEY_NBYTES = 32
PAGE_KEY_NBYTES = 64  # two keys of AES-256
TWEAK_NBYTES = 16
_NONCE_NBYTES = 12
KEY_MARK_NBYTES = 4  # of a key: identifies it for operators, without revealing it
_MARK_LABEL = b"kvstore-disk-key-1\0"

UNIT_NBYTES = LEAF_NBYTES
MARK_NBYTES = 8  # of a page's checksum

COMMAND_S = 30.0  # for the command that prints the operator's key
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
_FORM = (
    f"{WRAPPING_KEY_NBYTES} random bytes in hex or base64; `openssl rand -hex "
    f"{WRAPPING_KEY_NBYTES}` makes such a key"
)


def xts_works() -> bool:
    """Return whether the installed library supports AES-XTS on buffers in place."""
    unit = memoryview(bytearray(2 * TWEAK_NBYTES))
    try:
        encrypt(bytes(range(PAGE_KEY_NBYTES)), bytes(TWEAK_NBYTES), unit, unit)
        decrypt(bytes(range(PAGE_KEY_NBYTES)), bytes(TWEAK_NBYTES), unit)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return not any(unit)


def new_page_key() -> bytes:
    """Return a random page key."""
    return os.urandom(PAGE_KEY_NBYTES)


def encrypt(key: bytes, tweak: bytes, source: memoryview, target: memoryview) -> None:
    """Encrypt a unit of 16 bytes to 16 MiB into `target`, which may be the same memory.

    `target` has the same length, and may be the same memory.
    """
    Cipher(AES(key), XTS(tweak)).encryptor().update_into(source, target)


def decrypt(key: bytes, tweak: bytes, unit: memoryview) -> None:
    """Decrypt a unit in place."""
    Cipher(AES(key), XTS(tweak)).decryptor().update_into(unit, unit)


def wrap(key: bytes, secret: bytes, label: bytes) -> bytes:
    """Encrypt `secret` for `unwrap` with the same label."""
    nonce = os.urandom(_NONCE_NBYTES)
    return nonce + AESGCM(key).encrypt(nonce, secret, label)


def unwrap(key: bytes, wrapped: bytes, label: bytes) -> bytes | None:
    """Decrypt a wrapped secret; None if key or label differ or it is damaged."""
    try:
        return AESGCM(key).decrypt(wrapped[:_NONCE_NBYTES], wrapped[_NONCE_NBYTES:], label)
    except (InvalidTag, ValueError):  # ValueError: too short to have a nonce
        return None


class Vault(Protocol):
    """Keys of namespaces.

    `mark` identifies the operator's key, in hex; empty: nothing is encrypted.
    """

    mark: str

    def new_key(self) -> bytes:
        """Return a key for the pages of a new namespace; empty without encryption."""

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        """Return the value of a namespace's row."""

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Return (page key, description) of a row.

        Raises InvalidRequest for a row that it did not wrap.
        """


class PlainVault:
    """Vault without encryption."""

    mark = ""

    def new_key(self) -> bytes:
        """Return no key."""
        return b""

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        """Return the description as it is."""
        return description

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Return no key and the description."""
        return b"", value


PLAIN = PlainVault()


class EncryptedVault:
    """Vault with the operator's key.

    Raises ConfigError if `cryptography` is too old.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == WRAPPING_KEY_NBYTES
        if not xts_works():
            raise ConfigError(
                "the installed package `cryptography` can not do AES-256-XTS in place; update it"
            )
        self.mark = hashlib.sha256(_MARK_LABEL + key).digest()[:KEY_MARK_NBYTES].hex()
        self._key = key

    def new_key(self) -> bytes:
        """Return a random page key."""
        return new_page_key()

    def wrap(self, row_key: bytes, page_key: bytes, description: bytes) -> bytes:
        """Encrypt page key and description."""
        return wrap(self._key, page_key + description, row_key)

    def unwrap(self, row_key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Decrypt page key and description. Raises InvalidRequest."""
        secret = unwrap(self._key, value, row_key)
        if secret is None or len(secret) < PAGE_KEY_NBYTES:
            raise InvalidRequest("its wrapped key is damaged")
        return secret[:PAGE_KEY_NBYTES], secret[PAGE_KEY_NBYTES:]


class PageEncryption(NamedTuple):
    """Encryption of a slot.

    `key`: of the page's namespace.
    """

    offset: int
    key: bytes
    mark: bytes

    def __repr__(self) -> str:
        return f"PageEncryption({self.offset})"  # a key must not appear in logs

    def encrypt(self, start: int, source: memoryview, target: memoryview) -> None:
        """Encrypt bytes of the slot from `start` on, in whole units or to the slot's end."""
        for at in range(0, source.nbytes, UNIT_NBYTES):
            end = at + UNIT_NBYTES
            encrypt(self.key, self._tweak(start + at), source[at:end], target[at:end])

    def decrypt(self, start: int, view: memoryview) -> None:
        """Decrypt in place bytes of the slot from `start` on."""
        for at in range(0, view.nbytes, UNIT_NBYTES):
            decrypt(self.key, self._tweak(start + at), view[at : at + UNIT_NBYTES])

    def _tweak(self, start: int) -> bytes:
        assert start % UNIT_NBYTES == 0, f"{start} is within a unit"
        return ((self.offset + start) // SLOT_ALIGN_NBYTES).to_bytes(8, "little") + self.mark


class DiskLocation(NamedTuple):
    """Location of a page on disk; without `encryption` its bytes are plain."""

    offset: int
    encryption: PageEncryption | None


def disk_location(offset: int, key: bytes, checksum: bytes) -> DiskLocation:
    """Return a slot's location; `key` is empty without encryption."""
    return DiskLocation(
        offset, PageEncryption(offset, key, checksum[:MARK_NBYTES]) if key else None
    )


def open_vault(key_file: str, key_command: str) -> Vault:
    """Return the vault of a key file or command; a plain one without. Raises ConfigError."""
    if key_file:
        file = f"encrypt_key_file={key_file}"
        return EncryptedVault(_parsed(read_guarded(file, _OTHERS, SECRET_NBYTES_MAX), file))
    if key_command:
        return EncryptedVault(
            _parsed(_key_command_output(key_command), "the output of encrypt_key_command")
        )
    return PLAIN


def _key_command_output(command: str) -> bytes:
    """Run a key command and return its output. Raises ConfigError."""
    try:
        process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"encrypt_key_command can not be run: {error}") from None
    with process:
        try:
            output = _read_all(process, time.monotonic() + COMMAND_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ConfigError(
            f"encrypt_key_command ended with status {process.returncode}; run it by hand to see why"
        )
    return output


def _read_all(process: "subprocess.Popen[bytes]", end: float) -> bytes:
    """Read a process's output until it ends. Raises ConfigError if it is too late or too long."""
    assert process.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while ready.select(max(0.0, end - time.monotonic())):
            data = process.stdout.read(SECRET_NBYTES_MAX)
            output += data or b""
            if len(output) > SECRET_NBYTES_MAX:
                raise ConfigError(
                    f"encrypt_key_command's output has more than {SECRET_NBYTES_MAX} bytes"
                )
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
                    return bytes(output)
                break
    raise ConfigError(f"encrypt_key_command did not end in {COMMAND_S:g} s; it was killed")


def _parsed(text: bytes, where: str) -> bytes:
    text = text.strip()
    key = _decoded(text)
    if key is None or len(key) != WRAPPING_KEY_NBYTES:
        held = "neither hex nor base64" if key is None else f"a key of {len(key)} bytes"
        raise ConfigError(f"{where} is {held}, but must be {_FORM}")
    if len(set(key)) == 1:
        raise ConfigError(f"{where} is one byte again and again, but must be {_FORM}")
    return key


def _decoded(text: bytes) -> bytes | None:
    try:
        return binascii.unhexlify(text)
    except binascii.Error:
        pass
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
