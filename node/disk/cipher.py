"""What encrypts and wraps, with `cryptography`.

    units of a page    AES-256-XTS: as long as what it encrypts, and any change of it is noise in what comes out
    wrapped keys       AES-256-GCM with a random nonce: what was changed, or moved to another row, is told

Both let other threads run while they work on many bytes. XTS takes 7 µs a unit and 0.1 ms a MiB (docs/decisions/0030).
"""

import os

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import XTS

WRAPPING_KEY_NBYTES = 32
PAGE_KEY_NBYTES = 64  # two keys of AES-256
TWEAK_NBYTES = 16
_NONCE_NBYTES = 12


def works() -> bool:
    """Whether what is installed has this mode, and works where bytes lie, without room behind them."""
    unit = memoryview(bytearray(2 * TWEAK_NBYTES))
    try:
        encrypt(bytes(range(PAGE_KEY_NBYTES)), bytes(TWEAK_NBYTES), unit, unit)
        decrypt(bytes(range(PAGE_KEY_NBYTES)), bytes(TWEAK_NBYTES), unit)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return not any(unit)


def new_page_key() -> bytes:
    return os.urandom(PAGE_KEY_NBYTES)


def encrypt(key: bytes, tweak: bytes, source: memoryview, target: memoryview) -> None:
    """A unit of up to 16 MiB, of 16 bytes at least. `target` has the same length, and may be the same memory."""
    Cipher(AES(key), XTS(tweak)).encryptor().update_into(source, target)


def decrypt(key: bytes, tweak: bytes, unit: memoryview) -> None:
    """Where it lies."""
    Cipher(AES(key), XTS(tweak)).decryptor().update_into(unit, unit)


def wrap(key: bytes, secret: bytes, label: bytes) -> bytes:
    """`secret`, for `unwrap` with the same label."""
    nonce = os.urandom(_NONCE_NBYTES)
    return nonce + AESGCM(key).encrypt(nonce, secret, label)


def unwrap(key: bytes, wrapped: bytes, label: bytes) -> bytes | None:
    """None if it is not what `wrap` made with this key and label."""
    try:
        return AESGCM(key).decrypt(wrapped[:_NONCE_NBYTES], wrapped[_NONCE_NBYTES:], label)
    except (InvalidTag, ValueError):  # ValueError: it is too short to have a nonce
        return None
