"""The secret that pages are sealed with, from where the settings say it is."""

import os
import stat

from kvstore.config import PageKeyConfig
from kvstore.errors import ConfigError
from kvstore.seals import SECRET_NBYTES, PageKeys

_FILE_NBYTES_MAX = 1024


def page_keys(config: PageKeyConfig) -> PageKeys | None:
    """None where no secret is set. Raises ConfigError, in which no part of the secret stands."""
    if config.page_key and config.page_key_file:
        raise ConfigError("page_key and page_key_file are both set; leave one of them out")
    if config.page_key_file:
        return _parsed(_read(config.page_key_file), f"the file page_key_file={config.page_key_file}")
    return _parsed(config.page_key, "page_key") if config.page_key else None


def _parsed(text: str, where: str) -> PageKeys:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(f"{where} does not hold {2 * SECRET_NBYTES} hex digits; make some with: openssl rand -hex 32")
    return PageKeys(secret)


def _read(path: str) -> str:
    """Of a file that others than its owner and group can not open."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"page_key_file={path} is no regular file")
            if status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"page_key_file={path} is open to everybody (mode {mode:04o}): chmod 600 it")
            return file.read(_FILE_NBYTES_MAX).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"page_key_file={path} can not be read: {error.strerror}") from error
