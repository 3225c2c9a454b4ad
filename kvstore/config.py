"""Define settings as frozen dataclasses with ranges; only this module reads the environment.

A field made by `setting` carries its allowed range and help text. `load` takes explicit values
first, then `<PREFIX>_<FIELD>` from the environment, then the default (the caller's or the class's),
and ends the start with ConfigError naming the setting, its value and the range.
"""

import contextlib
import dataclasses
import functools
import ipaddress
import json
import os
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvstore.environment import IDENTITY_VARIABLES, is_set, log_unknown, variable_of
from kvstore.errors import ConfigError
from kvstore.units import parse_duration, parse_nbytes

GRPC_PORT = 7440
BULK_PORT = 7441
METRICS_PORT = 7442
# Schemes of addresses at which a client speaks frames from the first byte. For an address without a
# scheme, the client's first request goes over gRPC.
BULK_SCHEME, UNIX_SCHEME = "bulk://", "unix:"
LOCAL = "local"  # the node that engines of this user start on their host
# The kernel's sun_path has 108 bytes, one of them for the final zero.
PATH_NBYTES_MAX = 107

# Version of the protocol, checked at connect. Every change of the wire part of docs/FORMAT.md
# raises it. A peer that speaks the version before or after works with this one in the older version
# of both, so that the nodes of a cluster can be upgraded one by one.
PROTOCOL_VERSION = 4
FEED_WAIT_S_MAX = 20.0  # that a call waits for something to tell
# Nodes with an older version ignore the fields that involve other members: `near`, `ack_all`.
MEMBERS_VERSION = 4

# Limit of a gRPC message and of a bulk header. Pages cross gRPC in chunks well below it, so that
# the 4 MiB default of other languages' gRPC libraries is enough: 1 MiB chunk + envelope < 2 MiB.
MESSAGE_NBYTES_MAX = 2 << 20
GRPC_CHUNK_NBYTES = 1 << 20

# Keys x byte ranges of one get: a node keeps a 200-byte view of each piece, so at most 13 MB.
GET_PIECES_MAX = 1 << 16
GET_RANGES_MAX = 1 << 12  # ranges of one get: parsing more would delay other requests

# `int` also accepts other scripts' digits and underscores
_PORT = re.compile("[0-9]{1,5}")
_URL = re.compile(
    r"\s*(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^/?#@]*@)?(?P<place>[^/?#]*).*", re.DOTALL
)
_NOT_A_HOST = re.compile(r"[\s/@?#]")
# Settings of which one replaces the other: a given one hides the other's variable.
EITHER = {"token": "token_file", "token_file": "token"} | {
    "page_key": "page_key_file",
    "page_key_file": "page_key",
}
_TRUTHS = {"1": True, "0": False, "true": True, "false": False}
_LEVELS = {"warn": "WARNING"}  # another usual name of a log level

Config = TypeVar("Config")


def speaks(version: int) -> bool:
    """Return whether this side can talk to a peer of that protocol version."""
    return abs(version - PROTOCOL_VERSION) <= 1


def setting(
    default: Any,
    help: str,
    low: Any = None,
    high: Any = None,
    choices: tuple[str, ...] = (),
    expert: bool = False,
    when: str = "",
) -> Any:
    """Declare a dataclass field with help text and an inclusive range or a list of choices.

    `--help` leaves fields marked `expert` out. `when` says when to change the default, for
    docs/reference/flags.md.
    """
    meta = {"help": help, "low": low, "high": high, "choices": choices, "expert": expert}
    meta["when"] = when
    return dataclasses.field(default=default, metadata=meta)


def secret(help: str) -> Any:
    """Declare a field that only the environment sets: command lines are public on a host."""
    meta = {"help": help, "low": None, "high": None, "choices": (), "secret": True}
    return dataclasses.field(default="", repr=False, metadata=meta)


def load(
    cls: type[Config],
    prefix: str,
    values: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Build a checked `cls` from values, the environment, the caller's defaults and its own.

    A value of None counts as not given. Text is parsed to the field's type, so values may come from
    a command line as they are. Raises ConfigError.
    """
    given = {name: value for name, value in values.items() if value is not None}
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, value = field.name, given.get(field.name)
        if value is None:
            name, value = _from_environment(prefix, field.name, given, environ)
        if value is None:
            value = (defaults or {}).get(field.name, field.default)
        chosen[field.name] = parse_setting(name, value, field) if isinstance(value, str) else value
    return cls(**chosen)


def _from_environment(
    prefix: str, name: str, given: Container[str], environ: Mapping[str, str] | None
) -> tuple[str, str | None]:
    """Return the variable of a setting and its text; None if it is unset, empty or replaced."""
    variable, environ = variable_of(prefix, name), os.environ if environ is None else environ
    there = is_set(variable, environ) and EITHER.get(name) not in given
    return variable, environ[variable] if there else None


def reads_environment(prefix: str) -> Callable[[type[Config]], type[Config]]:
    """Make a dataclass of settings take what its constructor is not given from the environment."""

    def decorate(cls: type[Config]) -> type[Config]:
        plain: Any = cls.__init__
        known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        positional = [name for name, field in known.items() if not field.kw_only]

        @functools.wraps(plain)
        def init(self: Config, *values: Any, **named: Any) -> None:
            given = {*positional[: len(values)], *named}
            for name, field in known.items():
                variable, text = _from_environment(prefix, name, given, None)
                if name not in given and text is not None:
                    named[name] = parse_setting(variable, text, field)
            plain(self, *values, **named)

        cls.__init__ = init  # type: ignore[method-assign,assignment]
        return cls

    return decorate


def in_environment(cls: type[Any], prefix: str) -> frozenset[str]:
    """Return the names of the settings of `cls` that the environment gives."""
    names = (field.name for field in dataclasses.fields(cls))
    return frozenset(name for name in names if is_set(variable_of(prefix, name), os.environ))


def variables_of(cls: type[Any], prefix: str) -> set[str]:
    """Return the environment variables of all settings of a class."""
    return {variable_of(prefix, field.name) for field in dataclasses.fields(cls)}


def warn_unknown_variables(known: Collection[str], own: str = "") -> None:
    """Log the variables that begin with KVSTORE_ and set nothing, once in each process.

    `known`: the variables that this program reads; `own`: their prefix among those that belong to
    one program only, such as KVSTORE_NODE_.
    """
    log_unknown(os.environ, known, own)


def parse_setting(name: str, text: str, field: "dataclasses.Field[Any]") -> Any:
    """Parse the text of a setting to its type. Raises ConfigError, which begins with `name`."""
    kind: Any = type(field.default)
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise ConfigError(f"{name}={text!r} must be one of {', '.join(_TRUTHS)}")
        return _TRUTHS[text.lower()]
    if choices := field.metadata.get("choices"):
        return _choice(text, choices)
    try:
        if "nbytes" in field.name:
            return parse_nbytes(text, per_s=field.name.endswith("_per_s"))
        return _seconds(text, kind) if field.name.endswith("_s") else kind(text)
    except ValueError as error:
        low, high = field.metadata["low"], field.metadata["high"]
        raise ConfigError(f"{name}={text!r} is no number in {low}..{high}: {error}") from error


def _seconds(text: str, kind: type[int] | type[float]) -> float:
    """Parse '30', or a duration with a unit; an int must be whole seconds. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return kind(text)
    seconds = parse_duration(text)
    if kind is int and not seconds.is_integer():
        raise ValueError("it must be whole seconds")
    return kind(seconds)


def _choice(text: str, choices: tuple[str, ...]) -> str:
    """Return the choice that a text means in any case, or the text itself."""
    wanted = _LEVELS.get(text.lower(), text).lower()
    return next((choice for choice in choices if choice.lower() == wanted), text)


def check_settings(config: Any) -> None:
    """Raise ConfigError for the first field outside its range."""
    for field in dataclasses.fields(config):
        value, meta = getattr(config, field.name), field.metadata
        kind = type(field.default)
        if not isinstance(value, (int, float) if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            said = field.name if meta.get("secret") else f"{field.name}={value!r}"
            raise ConfigError(f"{said} must be a {kind.__name__}")
        if meta.get("choices") and value not in meta["choices"]:
            raise ConfigError(f"{field.name}={value!r} must be one of {', '.join(meta['choices'])}")
        low, high = meta.get("low"), meta.get("high")
        # False for NaN, too
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise ConfigError(f"{field.name}={value} is outside {low}..{high}")


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this host only.

    Of names, only `localhost` is: others would need a resolver.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def runtime_dir() -> str:
    """Return the directory for this user's Unix sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return f"{base}/kvstore" if base else f"/tmp/kvstore-{os.geteuid()}"


def local_file(name: str) -> str:
    """Return the path of a file of the node that this user's engines share (`local`)."""
    return f"{runtime_dir()}/local.{name}"


def named_context() -> str:
    """Return the context that the environment names for the command line; empty for none."""
    return os.environ.get("KVSTORE_CONTEXT", "")


def user_config_dir() -> str:
    """Return this user's directory for settings of kvstore; empty if it is not known.

    `XDG_CONFIG_HOME` counts if it is absolute, as its specification says.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    return f"{base}/kvstore" if os.path.isabs(base) else ""


def hub_cache_dir() -> str:
    """Return the Hugging Face cache directory of this user, by the hub's own rules."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "/hub"),
    ):
        if place := os.environ.get(variable):
            return os.path.expanduser(place + below)
    return os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface/hub")


@dataclass(frozen=True)
class Telemetry:
    """The variables of OpenTelemetry that we need; its SDK reads the others itself.

    `exporters`: their names; None means the default. `protocol`: of the otlp exporter; empty if
    unset.
    """

    exporters: tuple[str, ...]
    service: str
    protocol: str = ""


def telemetry(environ: Mapping[str, str] | None = None) -> Telemetry | None:
    """Return the tracing settings of the environment; None if tracing is off."""
    environ = os.environ if environ is None else environ
    said = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or said == "none":
        return None
    if not said and not any(environ.get(name) for name in endpoints):
        return None
    names = tuple(name.strip() for name in said.split(",") if name.strip())
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environ[name].strip() for name in protocols if environ.get(name)), "")
    return Telemetry(names, environ.get("OTEL_SERVICE_NAME", ""), protocol)


def quiet_grpc() -> None:
    """Keep gRPC's own log lines off the terminal, unless GRPC_VERBOSITY is set.

    Call it before gRPC is imported. An error of a call says the same as these lines.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Supervisor(NamedTuple):
    """The supervisor of this process, systemd for example.

    `socket`: where it takes notifications, empty for none. `watchdog_s`: how often it wants one at
    least; 0: never.
    """

    socket: str = ""
    watchdog_s: float = 0.0


def supervisor(environ: Mapping[str, str] | None = None) -> Supervisor:
    """Return the supervisor that NOTIFY_SOCKET names (sd_notify(3), sd_watchdog_enabled(3))."""
    environ = os.environ if environ is None else environ
    watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    usec = environ.get("WATCHDOG_USEC", "") if watched else ""
    return Supervisor(
        environ.get("NOTIFY_SOCKET", ""), int(usec) / 1e6 if usec.isdecimal() else 0.0
    )


def engine_variables(*names: str) -> dict[str, str]:
    """Return those of the named environment variables that are set.

    Engines read such variables, beside their arguments, to decide how they compute.
    """
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def engine_arguments(variable: str) -> dict[str, Any]:
    """Return the start arguments that an engine leaves in its environment as a JSON object.

    Raises ConfigError.
    """
    text = os.environ.get(variable)
    if not text:
        raise ConfigError(
            f"{variable} is not set: this must run in a process of the engine, which sets it"
        )
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{variable} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{variable} holds a JSON {type(arguments).__name__}, not an object")
    return arguments


class Address(NamedTuple):
    """Address of a node.

    `scheme`: `grpc`: the first request goes over gRPC; `bulk`: frames over TCP; `unix`: frames over
    the Unix socket at `path`, without host and port.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""


def parse_address(address: str) -> Address:
    """Parse 'host', 'host:port', '[v6]:port', 'bulk://host:port', 'unix:/path' or 'local'.

    Raises ConfigError; for other URLs it says what to write instead.
    """
    if address == LOCAL:
        try:
            return Address("unix", path=_socket_path(f"{UNIX_SCHEME}//{local_file('sock')}"))
        except ConfigError as error:
            raise ConfigError(f"address local needs another XDG_RUNTIME_DIR: {error}") from None
    if address.startswith(UNIX_SCHEME):
        return Address("unix", path=_socket_path(address))
    frames = address.startswith(BULK_SCHEME)
    place = address.removeprefix(BULK_SCHEME)
    if not frames:
        check_no_url("address", address)
    host, colon, port = place.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        if frames:
            raise ConfigError(
                f"address {address!r} names no port; write {BULK_SCHEME}HOST:{BULK_PORT}, or the "
                "node's"
            )
        host, port = place, str(GRPC_PORT)
    if (
        not host
        or _NOT_A_HOST.search(host)
        or not _PORT.fullmatch(port)
        or not 0 < int(port) < 1 << 16
    ):
        what = f"{BULK_SCHEME}host:port" if frames else "host:port"
        raise ConfigError(f"address {address!r} is not {what} with a port in 1..65535")
    return Address("bulk" if frames else "grpc", host.strip("[]"), int(port))


def _socket_path(address: str) -> str:
    path = address.removeprefix(UNIX_SCHEME)
    if path.startswith("//"):  # a URL without a host
        path = path.removeprefix("//")
    if not path.startswith("/"):
        raise ConfigError(
            f"address {address!r} is no absolute path; write {UNIX_SCHEME}/PATH with that of the "
            "node's shm_socket"
        )
    if not path.isprintable():
        raise ConfigError(f"address {address!r} is no path of a Unix socket")
    if len(os.fsencode(path)) > PATH_NBYTES_MAX:
        raise ConfigError(
            f"address {address!r}: a Unix socket's path has at most {PATH_NBYTES_MAX} bytes"
        )
    return path


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of a TCP address, with or without bulk://.

    Raises ConfigError, also for a Unix socket.
    """
    found = parse_address(address)
    if found.scheme == "unix":
        raise ConfigError(
            f"address {address!r} is a Unix socket's, which only this host reaches; write host:port"
        )
    return found.host, found.port


def light_wire(address: str) -> str:
    """Return the cheapest transport for one small request to these nodes, comma-separated.

    It is gRPC, which maps no memory and keeps no connection, unless an address names frames.
    """
    schemes = {parse_address(one.strip()).scheme for one in address.split(",")}
    return "grpc" if schemes == {"grpc"} else "auto" if "unix" in schemes else "bulk"


def check_no_url(name: str, address: str) -> None:
    """Raise ConfigError, with the fix, for a URL where host:port belongs.

    Otherwise a resolver would look for a host named "http://store" and only say that there is none.
    """
    url = _URL.fullmatch(address)
    if not url:
        return
    if url["scheme"].lower() == "etcd":
        remedy = (
            f"it names a cluster's etcd; write host:{GRPC_PORT} of one or more of the "
            "cluster's nodes"
        )
    else:
        place = url["place"].strip()
        port = "" if re.search(r":\d+$", place) else f":{GRPC_PORT}"
        remedy = f"write {place or 'host'}{port}, without {url['scheme']}://"
    # The part before the @ may hold a password
    shown = address.replace(url["user"], "...@") if url["user"] else address
    raise ConfigError(f"{name}={shown!r} is a URL, not host:port: {remedy}")


@dataclass(frozen=True, kw_only=True)
class PageKeyConfig:
    """Configure the secret with which this process signs and verifies pages, if it has one.

    See `kvstore.page_hmac`.
    """

    page_key_file: str = setting(
        "", "file with the secret that signs pages, 64 hex digits; empty: none"
    )
    page_key: str = secret("the same secret itself")


@reads_environment("KVSTORE")
@dataclass(frozen=True)
class ClientConfig(PageKeyConfig):
    """Configuration of a client.

    What is not given comes from the environment (KVSTORE_ADDRESS, KVSTORE_WIRE, ...), else from the
    defaults. A given `token` or `token_file` hides the variables of both, and so for the page key.
    """

    address: str = setting(
        f"localhost:{GRPC_PORT}",
        "address of a node: host:port (gRPC), bulk://host:port (bulk wire), unix:/path (socket on "
        "this host) or local (a node that engines start here); for a cluster members: a,b,c",
    )
    direct: bool = setting(False, "use the named node only, even if it is a member of a cluster")
    wire: str = setting(
        "auto",
        "wire for pages; auto: shared memory on this host, else bulk TCP, else gRPC",
        choices=("auto", "bulk", "grpc", "shm"),
    )
    near: str = setting(
        "auto",
        "near node of a cluster; auto: a member on this host; none: ask the owners of each page; "
        "or a member's id",
    )
    shm_dir: str = setting(
        "", "directory where the node's socket is mounted here; empty: where the node says"
    )
    timeout_s: float = setting(5.0, "deadline of a call without one of its own", 0.001, 3600.0)
    connect_timeout_s: float = setting(2.0, "deadline of a connection attempt", 0.001, 60.0)
    connections_max: int = setting(
        8, "bulk or shared-memory connections; more threads than this take turns", 1, 256
    )
    token: str = secret("token that authenticates this client")
    token_file: str = setting("", "file that holds the token, read at each connection")
    insecure: bool = setting(False, "send the token unencrypted to other hosts")
    backoff_s_max: float = setting(
        10.0, "longest pause of the circuit breaker of a node that fails", 0.01, 600.0
    )
    tls_ca: str = setting(
        "",
        "PEM file of the authorities of nodes' certificates; system: this host's; empty: no TLS",
    )
    tls_cert: str = setting("", "PEM file of this client's certificate, for nodes that require one")
    tls_key: str = setting("", "PEM file of its key")
    tls_name: str = setting(
        "", "name that a node's certificate must have; empty: the host in its address"
    )
    tenant: str = setting("", "tenant of the namespaces that this client opens; empty: the token's")

    def __post_init__(self) -> None:
        check_settings(self)
        for address in self.addresses:
            self._check_wire(address, parse_address(address).scheme)
        if self.direct and len(self.addresses) > 1:
            raise ConfigError(
                f"address={self.address} names {len(self.addresses)} nodes, but this needs "
                "a single one"
            )
        if self.token and self.token_file:
            raise ConfigError(
                "token and token_file are both set; set only one of them (KVSTORE_TOKEN, "
                "KVSTORE_TOKEN_FILE)"
            )
        if bool(self.tls_cert) != bool(self.tls_key) or (
            (self.tls_cert or self.tls_name) and not self.tls_ca
        ):
            raise ConfigError(
                "tls_cert and tls_key are given together; they and tls_name need tls_ca "
                "(KVSTORE_TLS_CERT, KVSTORE_TLS_KEY, KVSTORE_TLS_NAME, KVSTORE_TLS_CA)"
            )
        if self.connect_timeout_s > self.timeout_s:
            raise ConfigError(
                f"connect_timeout_s={self.connect_timeout_s} must not exceed "
                f"timeout_s={self.timeout_s}: connecting is part of a call "
                "(KVSTORE_CONNECT_TIMEOUT_S, KVSTORE_TIMEOUT_S)"
            )

    def _check_wire(self, address: str, scheme: str) -> None:
        """Raise ConfigError for a transport that this kind of address does not offer."""
        without = {"bulk": ("grpc",), "unix": ("grpc", "bulk")}.get(scheme, ())
        if self.wire in without:
            instead = (
                f"host:{GRPC_PORT}" if self.wire == "grpc" else f"{BULK_SCHEME}host:{BULK_PORT}"
            )
            raise ConfigError(
                f"wire={self.wire} is not to be had at address={address}; write {instead} of the "
                "node, or set another wire (KVSTORE_WIRE)"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the single addresses of the comma-separated list."""
        return tuple(address.strip() for address in self.address.split(","))


def client_config(**values: Any) -> ClientConfig:
    """Build a ClientConfig; values may be text, and None counts as not given.

    Variables that set nothing are logged once in each process.
    """
    warn_unknown_client_variables()
    return load(ClientConfig, "KVSTORE", values)


def warn_unknown_client_variables() -> None:
    """Log variables that begin with KVSTORE_ and that no client, agent or node reads."""
    warn_unknown_variables(CLIENT_VARIABLES)


CLIENT_VARIABLES = variables_of(ClientConfig, "KVSTORE") | IDENTITY_VARIABLES


def explicit_config(**values: Any) -> ClientConfig:
    """Build a ClientConfig from these values and the defaults, without the environment."""
    return load(ClientConfig, "KVSTORE", values, environ={})
