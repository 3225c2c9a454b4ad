"""Hold what every command shares: node address, deadline, --json; and make the client from them."""

import contextlib
import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvstore.cli.exits import ExitCode, leave_broken_pipe
from kvstore.cli.output import note
from kvstore.client import Client
from kvstore.config import ClientConfig, light_wire, load
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable

PATIENT_S = 120.0  # seconds, unless --timeout is given
_ADDRESS = typer.Option(
    "--address",
    "-a",
    metavar="HOST:PORT",
    help="Node to talk to; also bulk://HOST:PORT, unix:/PATH.",
)
_TIMEOUT = typer.Option("--timeout", metavar="SECONDS", help="Deadline of each request.")
_JSON = typer.Option("--json", help="Print JSON on stdout and nothing else there.")


@dataclass(frozen=True)
class Invocation:
    """One run of a command.

    `address` is None if neither an option nor the environment gives one.
    """

    address: str | None = None
    timeout_s: float | None = None
    as_json: bool = False

    def config(
        self, wire: str | None = None, address: str | None = None, **values: Any
    ) -> ClientConfig:
        """Return the client's configuration for a command. Raises ConfigError.

        `wire` is the user's choice; otherwise the environment's, or the cheapest for one request.
        """
        values |= {"wire": wire, "address": address or self.address}
        named = load(ClientConfig, "KVSTORE", {**values, "wire": "auto"}).address
        config = load(ClientConfig, "KVSTORE", values, defaults={"wire": light_wire(named)})
        if self.timeout_s is None:
            return config
        connect_s = min(config.connect_timeout_s, self.timeout_s)
        return dataclasses.replace(config, timeout_s=self.timeout_s, connect_timeout_s=connect_s)

    @property
    def patient_s(self) -> float:
        """Return the deadline in seconds of commands that may take long, such as a flush."""
        return self.timeout_s or PATIENT_S

    @contextmanager
    def client(
        self, wire: str | None = None, address: str | None = None, **values: Any
    ) -> Iterator[Client]:
        """Yield a client whose connection errors name the node's address and a remedy."""
        config = self.config(wire, address, **values)
        try:
            with Client(config) as client:
                yield client
        except (Unavailable, DeadlineExceeded) as error:
            raise type(error)(_explain(error, client)) from error


def _explain(error: KVStoreError, client: Client) -> str:
    """Name the node that an error comes from, and the remedy."""
    address, cluster = client.config.address, ""
    with contextlib.suppress(KVStoreError):
        view = client.view(timeout_s=0.0)  # the view that is already known, without a call
        cluster = view.cluster if view else ""
    if cluster:
        return f"cluster {cluster}: {error}; `kvstore cluster` shows which members answer"
    which = f"none of {address}" if "," in address else f"node {address}"
    if isinstance(error, DeadlineExceeded):
        return f"{which}: {error}; allow more time with --timeout"
    return (
        f"{which} is {'' if ',' in address else 'un'}available: {error}; is kvstore-node running "
        "there? Name another one with --address or KVSTORE_ADDRESS"
    )


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
    are accepted, completed and explained both before and after the command's name.
    """

    def wrapper(ctx: typer.Context, **arguments: Any) -> None:
        outer: Invocation = ctx.obj
        address, timeout_s, as_json = (
            arguments.pop(name) for name in ("address", "timeout_s", "as_json")
        )
        timeout_s = outer.timeout_s if timeout_s is None else timeout_s
        run = Invocation(address or outer.address, timeout_s, as_json or outer.as_json)
        if ctx.invoked_subcommand:  # a group that is also a command
            ctx.obj = run
            return
        try:
            with _remarks():
                code = function(run, **arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            code = leave_broken_pipe()
        raise typer.Exit(code or ExitCode.OK)

    own = list(inspect.signature(function).parameters.values())[1:]
    shared = [
        _parameter("address", Annotated[str | None, _ADDRESS], None),
        _parameter("timeout_s", Annotated[float | None, _TIMEOUT], None),
        _parameter("as_json", Annotated[bool, _JSON], False),
    ]
    context = _parameter("ctx", typer.Context, inspect.Parameter.empty)
    parameters = [
        context,
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *shared,
    ]
    signature = inspect.Signature(parameters)
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
    return wrapper


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
