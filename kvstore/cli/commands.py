"""Define the `kvstore` command: its subcommands and the options before them."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from kvstore import __version__
from kvstore.cli.exits import Root
from kvstore.cli.help import Command, Group
from kvstore.cli.invocation import Invocation, command, shared_options
from kvstore.config import named_context

HELP = """Look into kvstore nodes, move pages, measure.

Options that all commands share (--json and those below) may stand before or after the command.
Namespaces are named by the start of their digest or by --model, keys by the start of their hash, as
long as only one fits; if only one namespace has pages it need not be named.

\b
Examples:
  kvstore status
  kvstore ls --model llama-3-8b --limit 5
  kvstore lookup --tokens-file prompt.txt --json
  kvstore get 9c0d41 --decode
  kvstore replay trace.jsonl --capacity-pages 10000
  kvstore plan trace.jsonl --ram 64GiB --disk 2TiB
  kvstore cluster -a node1:7440,node2:7440

\b
Exit codes:
  0    ok
  1    miss, not found, or nothing matched; a check of doctor failed
  2    wrong usage or invalid request
  3    node unavailable, member lost, or deadline exceeded
  4    the node or a limit is exhausted
  5    corrupt data, or bytes that differ from what was written
  74   the output can not be written
  130  interrupted; 141 when the reader of the output went away
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit()


def options(
    ctx: typer.Context,
    shared: dict[str, Any],
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that all commands share."""
    ctx.obj = Invocation(named=named_context()).merged(shared)


# Each command's module in kvstore.cli and its function.
COMMANDS = {
    "status": "cluster.status",
    "top": "top.command.top",
    "doctor": "doctor.doctor",
    "ls": "pages.ls",
    "stat": "pages.stat",
    "lookup": "pages.lookup",
    "get": "payload.get",
    "put": "payload.put",
    "feed": "routers.feed.feed",
    "query": "routers.query.query",
    "events": "routers.events.events",
    "rm": "pages.rm",
    "pin": "pages.pin",
    "unpin": "pages.unpin",
    "verify": "pages.verify",
    "forget": "disk.forget",
    "flush": "disk.flush",
    "scrub": "disk.scrub",
    "recover": "disk.recover",
    "bench": "load.bench_command",
    "replay": "load.replay_command",
    "plan": "plan.plan",
    "record": "load.record",
}


class Subcommands(NamedTuple):
    """A group of commands. `function`: what the group does without one of them."""

    commands: dict[str, str]
    help: str = ""
    function: str = ""
    needs_command: bool = True


GROUPS = {
    "cluster": Subcommands(
        {
            "events": "cluster.events",
            "owners": "cluster.owners",
            "drain": "cluster.drain",
            "forget-member": "cluster.forget_member",
            "rebalance": "cluster.rebalance",
        },
        function="cluster.cluster",
        needs_command=False,
    ),
    "tokens": Subcommands(
        {
            "add": "access.tokens.add",
            "list": "access.tokens.list_",
            "revoke": "access.tokens.revoke",
        },
        "Manage identities and their rights in the identities file.",
    ),
    "identities": Subcommands(
        {"push": "access.identities.push"}, "Distribute the identities file."
    ),
    "tenants": Subcommands(
        {"list": "access.tenants.list_", "quota": "access.tenants.quota"},
        "Show what tenants use, and change their quotas.",
    ),
    "certs": Subcommands(
        {"ca": "certs.ca", "node": "certs.node", "client": "certs.client"},
        "Make an authority, and certificates for nodes and clients.",
        needs_command=False,
    ),
    "context": Subcommands(
        {
            "add": "contexts.commands.add",
            "list": "contexts.commands.list_",
            "show": "contexts.commands.show",
            "use": "contexts.commands.use",
            "remove": "contexts.commands.remove",
        },
        "Store connection settings under a name.",
    ),
}


@cache
def build(only: str = "") -> typer.Typer:
    """Return the command line.

    With the name of a command or group in `only`, it has no others: their modules, and typer's work
    on their options, take longer than most commands. Any other name returns all of them.
    """
    app = typer.Typer(cls=Root, help=HELP, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(shared_options(options))
    single = only in COMMANDS or only in GROUPS
    for name, path in COMMANDS.items():
        if not single or name == only:
            app.command(name, cls=Command)(command(_function(path)))
    for name, group in GROUPS.items():
        if not single or name == only:
            app.add_typer(_group(group), name=name)
    return app


def _group(group: Subcommands) -> typer.Typer:
    # Without `help`, typer takes the docstring of the function.
    about: dict[str, Any] = {"help": group.help} if group.help else {}
    app = typer.Typer(
        cls=Group, rich_markup_mode=None, no_args_is_help=group.needs_command, **about
    )
    if group.function:
        app.callback(invoke_without_command=True)(command(_function(group.function)))
    for name, path in group.commands.items():
        app.command(name, cls=Command)(command(_function(path)))
    return app


def _function(path: str) -> Callable[..., int | None]:
    module, _, name = path.rpartition(".")
    function: Callable[..., int | None] = getattr(import_module(f"kvstore.cli.{module}"), name)
    return function
