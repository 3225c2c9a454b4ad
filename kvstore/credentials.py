"""Who a client is, to a node that asks: a token, and the tenant with whose name it begins.

team-a.Yq3...43 characters      of tenant team-a
Yq3...43 characters             of all tenants
"""

import os
import re
import stat
from collections.abc import Sequence

from kvstore.config import ClientConfig, is_loopback
from kvstore.errors import ConfigError

DEFAULT_TENANT = "default"
TOKEN_NBYTES_MAX = 1024
_TOKEN = re.compile(r"[!-~]+")  # what a header of HTTP may carry


def token_of(config: ClientConfig) -> str:
    """As it is now: a file is read again. Raises ConfigError, which does not say it."""
    token = _read(config.token_file) if config.token_file else config.token
    if token and (len(token) > TOKEN_NBYTES_MAX or not _TOKEN.fullmatch(token)):
        raise ConfigError(f"the token is no word of 1 to {TOKEN_NBYTES_MAX} characters of ASCII")
    return token


def _read(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # to open a pipe could wait for ever
            raise ConfigError(f"token_file={path} is no regular file")
        if mode & stat.S_IROTH:
            raise ConfigError(f"token_file={path} can be read by everybody on this host; chmod o-r {path}")
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(TOKEN_NBYTES_MAX + 2).strip()
    except OSError as error:
        raise ConfigError(f"token_file={path} can not be read: {error.strerror}") from error


def tenant_of(config: ClientConfig) -> str:
    """Whose namespaces this client opens, unless somebody says otherwise."""
    tenant, dot, _ = token_of(config).partition(".")
    return tenant if dot and tenant else DEFAULT_TENANT


def check_stays_private(token: str, config: ClientConfig, addresses: Sequence[str]) -> None:
    """Raises ConfigError for a token that would cross a network unencrypted."""
    if token and not (config.tls_ca or config.insecure) and not all(map(is_loopback, addresses)):
        raise ConfigError(
            "a token would cross the network unencrypted; set tls_ca (KVSTORE_TLS_CA), or insecure if that is as it "
            "should be"
        )
