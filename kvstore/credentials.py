"""Who a client is, to a node that asks: a token, and the tenant with whose name it begins.

team-a.Yq3...43 characters      of tenant team-a
Yq3...43 characters             of all tenants
"""

import re
import stat
from collections.abc import Sequence

from kvstore.config import ClientConfig, is_loopback
from kvstore.errors import ConfigError
from kvstore.guarded_file import SECRET_NBYTES_MAX, read_guarded

DEFAULT_TENANT = "default"
TOKEN_NBYTES_MAX = 1024
_TOKEN = re.compile(r"[!-~]+")  # what a header of HTTP may carry


def token_of(config: ClientConfig) -> str:
    """As it is now: a file is read again. Raises ConfigError, which does not say it."""
    token = config.token
    if config.token_file:
        content = read_guarded(f"token_file={config.token_file}", stat.S_IROTH, SECRET_NBYTES_MAX)
        token = content.decode("ascii", "replace").strip()
    if token and (len(token) > TOKEN_NBYTES_MAX or not _TOKEN.fullmatch(token)):
        raise ConfigError(f"the token is no word of 1 to {TOKEN_NBYTES_MAX} characters of ASCII")
    return token


def tenant_of(config: ClientConfig) -> str:
    """Return a client's tenant: the configured one, else its token's, else "default".

    Programs and all adapters use this. With a client certificate, configure the tenant. It may differ from the
    token's, because tenants can share namespaces; otherwise the node refuses it with an error that names both.
    Raises ConfigError if the tenant must come from a token that can not be read.
    """
    if config.tenant:
        return config.tenant
    tenant, dot, _ = token_of(config).partition(".")
    return tenant if dot and tenant else DEFAULT_TENANT


def check_stays_private(token: str, config: ClientConfig, addresses: Sequence[str]) -> None:
    """Raises ConfigError for a token that would cross a network unencrypted."""
    if token and not (config.tls_ca or config.insecure) and not all(map(is_loopback, addresses)):
        raise ConfigError(
            "a token would cross the network unencrypted; set tls_ca (KVSTORE_TLS_CA), or insecure if that is as it "
            "should be"
        )
