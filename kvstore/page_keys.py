"""The secret that pages are sealed with, from where the settings say it is."""

import stat

from kvstore.config import PageKeyConfig
from kvstore.errors import ConfigError
from kvstore.guarded_file import SECRET_NBYTES_MAX, read_guarded
from kvstore.seals import SECRET_NBYTES, PageKeys

_EVERYBODY = stat.S_IROTH | stat.S_IWOTH


def page_keys(config: PageKeyConfig) -> PageKeys | None:
    """None where no secret is set. Raises ConfigError, in which no part of the secret stands."""
    if config.page_key and config.page_key_file:
        raise ConfigError("page_key and page_key_file are both set; leave one of them out")
    if config.page_key_file:
        file = f"page_key_file={config.page_key_file}"
        content = read_guarded(file, _EVERYBODY, SECRET_NBYTES_MAX)
        return _parsed(content.decode("ascii", "replace"), f"the file {file}")
    return _parsed(config.page_key, "page_key") if config.page_key else None


def _parsed(text: str, where: str) -> PageKeys:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(f"{where} does not hold {2 * SECRET_NBYTES} hex digits; make some with: openssl rand -hex 32")
    return PageKeys(secret)
