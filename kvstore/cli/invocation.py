"""Hold what every command shares: connection, deadline, --json; and make the client from them."""

import contextlib
import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import typer

from kvstore.cli.contexts import store
from kvstore.cli.exits import ExitCode, leave_broken_pipe
from kvstore.cli.help import PANEL
from kvstore.cli.output import note
from kvstore.client import Client
from kvstore.config import (
    LOCAL,
    ClientConfig,
    in_environment,
    light_wire,
    load,
    user_config_dir,
    warn_unknown_client_variables,
)
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, Unavailable

PATIENT_S = 120.0  # seconds, unless --timeout is given


def _complete_context(incomplete: str) -> list[str]:
    """Complete names of contexts for the shell."""
    with contextlib.suppress(KVStoreError):
        return sorted(name for name in store.read().by_name if name.startswith(incomplete))
    return []


def _connection(flag: str, what: str, metavar: str = "FILE", short: str = "") -> Any:
    """Annotate an option of the connection. Its variable is KVSTORE_ and the flag's name."""
    names = (flag, short) if short else (flag,)
    option = typer.Option(*names, metavar=metavar, help=what, rich_help_panel=PANEL)
    return Annotated[str | None, option]


def _switch(flag: str, what: str) -> Any:
    return Annotated[bool | None, typer.Option(flag, help=what, rich_help_panel=PANEL)]


# The options of the connection, by the setting of ClientConfig that each gives.
CONNECTION: dict[str, Any] = {
    "address": _connection(
        "--address",
        "Node, or members of a cluster; also bulk://HOST:PORT, unix:/PATH.",
        "HOST:PORT",
        "-a",
    ),
    "direct": _switch("--direct", "Use the named member only, not its cluster."),
    "wire": _connection("--wire", "Transport for pages.", "auto|shm|bulk|grpc"),
    "tls_ca": _connection("--tls-ca", "Authorities of nodes' certificates, or system."),
    "tls_cert": _connection("--tls-cert", "This client's certificate."),
    "tls_key": _connection("--tls-key", "Its key."),
    "tls_name": _connection("--tls-name", "Name in the node's certificate.", "NAME"),
    "token_file": _connection("--token-file", "File with this client's token."),
    "insecure": _switch("--insecure", "Send the token without TLS to other hosts."),
    "tenant": _connection("--tenant", "Tenant of namespaces to open.", "TENANT"),
    "page_key_file": _connection("--page-key-file", "Key that signs pages."),
}
_CONTEXT = typer.Option(
    "--context",
    metavar="NAME",
    help="Settings stored by kvstore context; none: use none.",
    rich_help_panel=PANEL,
    autocompletion=_complete_context,
)
_TIMEOUT = typer.Option(
    "--timeout",
    metavar="SECONDS",
    help="Deadline of each request. [default: 5]",
    rich_help_panel=PANEL,
)
_JSON = typer.Option("--json", help="Print JSON on stdout and nothing else there.")
# The options that all commands share, and their defaults.
SHARED: dict[str, tuple[Any, Any]] = {
    "as_json": (Annotated[bool, _JSON], False),
    **{name: (annotation, None) for name, annotation in CONNECTION.items()},
    "context": (Annotated[str | None, _CONTEXT], None),
    "timeout_s": (Annotated[float | None, _TIMEOUT], None),
}


@dataclass(frozen=True)
class Invocation:
    """One run of a command.

    `given`: settings of ClientConfig that options give. `named`: the name of the context that an
    option or the environment gives; empty: the current one.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float | None = None
    as_json: bool = False
    named: str = ""

    def merged(self, given: Mapping[str, Any]) -> "Invocation":
        """Return this invocation with the shared options that stand behind the command's name."""
        timeout_s = given.get("timeout_s")
        return Invocation(
            {**self.given, **{name: given[name] for name in CONNECTION if name in given}},
            self.timeout_s if timeout_s is None else timeout_s,
            bool(given.get("as_json")) or self.as_json,
            given.get("context") or self.named,
        )

    @cached_property
    def context(self) -> tuple[str, dict[str, Any]]:
        """Return the name and settings of the context in use; empty without one.

        A file that can not be read is an error only if a context is named. Raises ConfigError and
        InvalidRequest.
        """
        if self.named == store.NONE:
            return "", {}
        try:
            contexts = store.read()
        except ConfigError as error:
            if self.named:
                raise
            if user_config_dir():
                note(f"no context is used: {error}")
            return "", {}
        name = self.named or contexts.current
        return (name, contexts.get(name)) if name else ("", {})

    @property
    def used_context(self) -> str:
        """Return the name of the context that this run has used; empty if none."""
        return self.context[0] if "context" in self.__dict__ else ""

    def config(self, default_wire: str = "", **values: Any) -> ClientConfig:
        """Return the client's configuration for a command. Raises ConfigError.

        `values` come first, then options, the environment and the context. `default_wire` is used
        if none of them names a wire; without it, the cheapest for one request.
        """
        given = {**self.given, **{k: v for k, v in values.items() if v is not None}}
        # A file named by an option replaces a secret in the environment.
        given |= {store.ALTERNATIVES[name]: "" for name in store.ALTERNATIVES if given.get(name)}
        warn_unknown_client_variables()
        defaults = store.defaults_of(self.context[1])
        named = load(ClientConfig, "KVSTORE", {**given, "wire": "auto"}, defaults=defaults).address
        defaults = {"wire": default_wire or light_wire(named), **defaults}
        config = load(ClientConfig, "KVSTORE", given, defaults=defaults)
        if self.timeout_s is None:
            return config
        connect_s = min(config.connect_timeout_s, self.timeout_s)
        return dataclasses.replace(config, timeout_s=self.timeout_s, connect_timeout_s=connect_s)

    @property
    def names_address(self) -> bool:
        """Return whether an option, the environment or a named context gives an address.

        The current context does not count: a command that loads a node must not find one by
        surprise.
        """
        given = "address" in self.given or "address" in in_environment(ClientConfig, "KVSTORE")
        return given or (bool(self.named) and "address" in self.context[1])

    @property
    def patient_s(self) -> float:
        """Return the deadline in seconds of commands that may take long, such as a flush."""
        return self.timeout_s or PATIENT_S

    @contextmanager
    def client(self, default_wire: str = "", **values: Any) -> Iterator[Client]:
        """Yield a client whose connection errors name the node's address and a remedy."""
        config = self.config(default_wire, **values)
        try:
            with Client(config) as client:
                yield client
        except (Unavailable, DeadlineExceeded) as error:
            raise type(error)(_explain(error, client)) from error


# An error that names a setting or an address to write has its remedy: a process answers there.
_NAMES_REMEDY = re.compile(r"\bKVSTORE_|\btls_|--[a-z]|\bwrite bulk://")


def _explain(error: KVStoreError, client: Client) -> str:
    """Name the node that an error comes from, and the remedy."""
    address, cluster = client.config.address, ""
    with contextlib.suppress(KVStoreError):
        view = client.view(timeout_s=0.0)  # the view that is already known, without a call
        cluster = view.cluster if view else ""
    if cluster:
        return f"cluster {cluster}: {error}; `kvstore cluster` shows which members answer"
    which = f"none of {address}" if "," in address else f"node {address}"
    what = str(error).removeprefix(f"{address}: ").removeprefix(f"{address} ")
    if _NAMES_REMEDY.search(what):
        return f"{which}: {what}"
    if isinstance(error, DeadlineExceeded):
        return f"{which}: {what}; allow more time with --timeout"
    problem = f"{which} is {'' if ',' in address else 'un'}available: {what}"
    remedy = "is kvstore-node running there? Name"
    if address == LOCAL:
        remedy = "engines of this user with KVSTORE_ADDRESS=local start it. Or name"
    return f"{problem}; {remedy} another one with --address or KVSTORE_ADDRESS"


class _Remarks(logging.Handler):
    """Print each warning of the library once per member: a command calls it several times."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        about = (str(record.msg), str(first))
        if about not in self._said:
            self._said.add(about)
            note(record.getMessage())


@contextmanager
def _remarks() -> Iterator[None]:
    handler, logger = _Remarks(), logging.getLogger("kvstore")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Turn `function(run: Invocation, ...) -> exit code` (None: 0) into a typer command.

    The options that all commands share stand after the command's own in its signature, so that they
    are accepted, completed and explained both before and after the command's name. A command's own
    option of the same name replaces the shared one.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    shared = [name for name in SHARED if name not in {parameter.name for parameter in own}]

    def wrapper(ctx: typer.Context, **arguments: Any) -> None:
        outer: Invocation = ctx.obj
        popped = {name: arguments.pop(name) for name in shared}
        run = outer.merged({name: value for name, value in popped.items() if value is not None})
        if ctx.invoked_subcommand:  # a group that is also a command
            ctx.obj = run
            return
        try:
            with _remarks():
                code = function(run, **arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            code = leave_broken_pipe()
        except KVStoreError as error:
            if not run.used_context:
                raise
            raise type(error)(f"context {run.used_context}: {error}") from error
        raise typer.Exit(code or ExitCode.OK)

    parameters = [
        _parameter("ctx", typer.Context, inspect.Parameter.empty),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *shared_parameters(shared),
    ]
    _sign(wrapper, parameters)
    wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
    return wrapper


def shared_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to the callback of the root command.

    It gets their values in a dictionary, `shared`, without those that are not given.
    """

    def wrapper(ctx: typer.Context, **arguments: Any) -> None:
        popped = {name: arguments.pop(name) for name in SHARED}
        shared = {name: value for name, value in popped.items() if value is not None}
        function(ctx, shared=shared, **arguments)

    own = inspect.signature(function).parameters.values()
    kept = [parameter for parameter in own if parameter.name != "shared"]
    _sign(wrapper, [*shared_parameters(SHARED), *kept])
    wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
    return wrapper


def shared_parameters(names: Iterable[str]) -> list[inspect.Parameter]:
    """Return the parameters of shared options."""
    return [_parameter(name, *SHARED[name]) for name in names]


def _sign(wrapper: Any, parameters: list[inspect.Parameter]) -> None:
    """Give a function these parameters, for typer."""
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    wrapper.__signature__ = inspect.Signature(parameters)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
