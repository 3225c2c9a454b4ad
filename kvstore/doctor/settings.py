"""This client's settings: the files that they name, and until when they are good."""

import time
from collections.abc import Iterator

from kvstore.certificates import NEAR_END_S, SYSTEM, date
from kvstore.config import ClientConfig
from kvstore.credentials import token_of
from kvstore.doctor.finding import Finding, fail, ok, warn
from kvstore.errors import ConfigError
from kvstore.page_keys import page_keys
from kvstore.wires.tls import client_tls
from kvstore.x509 import check_dates, first_expiry, validity


def findings(config: ClientConfig) -> Iterator[Finding]:
    yield _address(config)
    yield from _files(config)
    yield _token(config)
    if config.page_key or config.page_key_file:
        yield _page_key(config)


def ends(name: str, what: str, seconds: float) -> Finding:
    """Of something whose time is up then, in seconds of Unix time."""
    left_s = seconds - time.time()
    said = f"{what} until {date(seconds)}"
    if left_s <= 0:
        return fail(
            name, f"{what} has expired on {date(seconds)}", "renew it: write new files in place of the old ones"
        )
    if left_s < NEAR_END_S:
        return warn(name, f"{said}, {left_s / 86400:.1f} days from now", "renew it: new files in place of the old ones")
    return ok(name, f"{said}, {left_s / 86400:,.0f} days from now")


def _address(config: ClientConfig) -> Finding:
    direct = ", that node alone" if config.direct else ""
    near = "" if config.near == "auto" else f", near {config.near}"
    said = f"{config.address}{direct}, wire {config.wire}{near}"
    return ok("settings", f"{said}, {config.timeout_s:g} s a call, {config.connect_timeout_s:g} s to connect")


def _files(config: ClientConfig) -> Iterator[Finding]:
    tls = client_tls(config, "")
    if tls is None:
        yield ok("TLS files", "none: this client speaks without TLS")
        return
    try:
        pems = tls.files.look()
        roots_end = 0.0 if config.tls_ca == SYSTEM else first_expiry(pems.roots)
    except ConfigError as error:
        yield fail("TLS files", str(error), "KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY name them")
        return
    if roots_end:
        yield ends("TLS files", f"tls_ca={config.tls_ca}", roots_end)
    else:
        yield ok("TLS files", "the authorities that this host believes")
    if pems.chain:
        yield _own_certificate(f"tls_cert={config.tls_cert}", pems.chain)


def _own_certificate(file: str, pem: bytes) -> Finding:
    try:
        check_dates(file, pem)
    except ConfigError as error:
        remedy = "kvstore certs client NAME --force makes a new one, if the authority is ours"
        return fail("own certificate", str(error), remedy)
    return ends("own certificate", file, validity(pem)[1])


def _token(config: ClientConfig) -> Finding:
    try:
        token = token_of(config)
    except ConfigError as error:
        return fail("token", str(error), "KVSTORE_TOKEN_FILE names a file with one word that others can not read")
    if config.token_file and not token:
        return fail("token", f"token_file={config.token_file} is empty", "write the token into it: kvstore tokens add")
    source = f"from {config.token_file}" if config.token_file else "from KVSTORE_TOKEN"
    return ok("token", f"set, {source}" if token else "none")


def _page_key(config: ClientConfig) -> Finding:
    try:
        keys = page_keys(config)
    except ConfigError as error:
        return fail("page key", str(error), "KVSTORE_PAGE_KEY_FILE names a file with 64 hex digits")
    assert keys is not None
    return ok("page key", f"{keys.key_id}: engines with another one find none of its pages")
