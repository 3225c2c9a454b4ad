"""The operator's key of an encrypted disk tier: from a file that only its owner reads, or from a command that asks a
key service. It is never logged, and no error says more of it than its length."""

import base64
import binascii
import shlex
import stat
import subprocess

from kvstore.errors import ConfigError
from kvstore.guarded_file import SECRET_NBYTES_MAX, read_guarded
from node.disk.cipher import WRAPPING_KEY_NBYTES
from node.disk.vault import PLAIN, Locked, Vault

COMMAND_S = 30.0
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
_FORM = (
    f"{WRAPPING_KEY_NBYTES} random bytes in hex or base64; `openssl rand -hex {WRAPPING_KEY_NBYTES}` makes such a key"
)


def open_vault(key_file: str, key_command: str) -> Vault:
    """Plain if both are empty. Raises ConfigError."""
    if key_file:
        file = f"encrypt_key_file={key_file}"
        return Locked(_parsed(read_guarded(file, _OTHERS, SECRET_NBYTES_MAX), file))
    if key_command:
        return Locked(_parsed(_said(key_command), "what encrypt_key_command printed"))
    return PLAIN


def _said(command: str) -> bytes:
    """What it writes to its standard output; what it writes beside goes where this process's does."""
    try:
        done = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"encrypt_key_command did not end in {COMMAND_S:g} s; it was killed") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"encrypt_key_command can not be run: {error}") from None
    if done.returncode:
        raise ConfigError(f"encrypt_key_command ended with status {done.returncode}; run it by hand to see why")
    return done.stdout[: SECRET_NBYTES_MAX + 1]


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
