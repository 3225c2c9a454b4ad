"""Define the `kvstore` command: its subcommands and the options before them."""

from typing import Annotated, Any

import typer

from kvstore import __version__
from kvstore.cli import certs, cluster, disk, load, pages, payload, plan
from kvstore.cli.access import identities, tenants, tokens
from kvstore.cli.cluster import status
from kvstore.cli.contexts import commands as contexts
from kvstore.cli.doctor import doctor
from kvstore.cli.exits import Root
from kvstore.cli.help import Command, Group
from kvstore.cli.invocation import Invocation, command, shared_options
from kvstore.cli.top.command import top
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

app = typer.Typer(cls=Root, help=HELP, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit()


@app.callback()
@shared_options
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


for _name, _function in (
    ("status", status),
    ("top", top),
    ("doctor", doctor),
    ("ls", pages.ls),
    ("stat", pages.stat),
    ("lookup", pages.lookup),
    ("get", payload.get),
    ("put", payload.put),
    ("rm", pages.rm),
    ("pin", pages.pin),
    ("unpin", pages.unpin),
    ("verify", pages.verify),
    ("forget", disk.forget),
    ("flush", disk.flush),
    ("scrub", disk.scrub),
    ("recover", disk.recover),
    ("bench", load.bench_command),
    ("replay", load.replay_command),
    ("plan", plan.plan),
    ("record", load.record),
):
    app.command(_name, cls=Command)(command(_function))

_cluster = typer.Typer(cls=Group, rich_markup_mode=None)
_cluster.callback(invoke_without_command=True)(command(cluster.cluster))
_cluster.command("events", cls=Command)(command(cluster.events))
_cluster.command("owners", cls=Command)(command(cluster.owners))
_cluster.command("drain", cls=Command)(command(cluster.drain))
_cluster.command("forget-member", cls=Command)(command(cluster.forget_member))
_cluster.command("rebalance", cls=Command)(command(cluster.rebalance))
app.add_typer(_cluster, name="cluster")

_tokens = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Manage identities and their rights in the identities file.",
)
_tokens.command("add", cls=Command)(command(tokens.add))
_tokens.command("list", cls=Command)(command(tokens.list_))
_tokens.command("revoke", cls=Command)(command(tokens.revoke))
app.add_typer(_tokens, name="tokens")

_identities = typer.Typer(
    cls=Group, rich_markup_mode=None, no_args_is_help=True, help="Distribute the identities file."
)
_identities.command("push", cls=Command)(command(identities.push))
app.add_typer(_identities, name="identities")

_tenants = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Show what tenants use, and change their quotas.",
)
_tenants.command("list", cls=Command)(command(tenants.list_))
_tenants.command("quota", cls=Command)(command(tenants.quota))
app.add_typer(_tenants, name="tenants")

_certs = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    help="Make certificates for nodes and clients, signed by your own authority.",
)
_certs.command("ca", cls=Command)(command(certs.ca))
_certs.command("node", cls=Command)(command(certs.node))
_certs.command("client", cls=Command)(command(certs.client))
app.add_typer(_certs, name="certs")

_contexts = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Store connection settings under a name, for the command line only.",
)
_contexts.command("add", cls=Command)(command(contexts.add))
_contexts.command("list", cls=Command)(command(contexts.list_))
_contexts.command("show", cls=Command)(command(contexts.show))
_contexts.command("use", cls=Command)(command(contexts.use))
_contexts.command("remove", cls=Command)(command(contexts.remove))
app.add_typer(_contexts, name="context")
