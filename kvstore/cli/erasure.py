"""The command that erases a tenant: forget."""

from typing import Annotated

import typer

from kvstore.cli.everywhere import away_json, without
from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, human_nbytes, note, progress
from kvstore.cli.pages import confirm
from kvstore.client import Client
from kvstore.cluster.spread import Away
from kvstore.doctor.hints import page_count
from kvstore.management import FORGET_TIMEOUT_S


def forget(
    run: Invocation,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose pages and descriptions are erased.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Erase all that a tenant has: removed, zeroed in RAM, and its disk keys destroyed.

    Without encryption, bytes of its pages may stay on the disk's medium until other pages overwrite
    them. A page that the tenant puts meanwhile may stay. Exit 4 if something is left, 3 if a member
    of a cluster does not answer: run it again then.

    \b
    Examples:
      kvstore forget --tenant acme
      kvstore forget --tenant acme --yes --json --timeout 3600
    """
    away: Away = {}
    with run.client() as client:
        spaces, pages = _about(client, tenant)
        if not yes:
            confirm(f"Erase {spaces} namespaces of {tenant} with {pages} pages?")
        with progress(f"erasing {tenant}", 1.0) as report:
            told = client.forget(tenant, run.timeout_s or FORGET_TIMEOUT_S, away)
            report(1.0)
        alone = client.view() is None
    if run.as_json:
        counts = ("namespaces", "pages", "ram_nbytes", "keys_destroyed", "left", "plain_disk")
        found = {name: getattr(told, name) for name in counts}
        emit({"tenant": tenant, **found, "why": list(told.why), **away_json(None if alone else away)})
    else:
        print(
            f"{tenant}: {told.pages:,} pages of {told.namespaces:,} namespaces are gone; "
            f"{human_nbytes(told.ram_nbytes)} of RAM zeroed, "
            f"{told.keys_destroyed:,} keys destroyed; left: {told.left:,}"
        )
    if told.plain_disk:
        note("the disk is not encrypted: bytes of these pages may stay on its medium until other pages overwrite them")
    for reason in told.why:
        note(f"{reason}; run it again")
    code = without(away, "; what it has of this tenant is there: run it again when it answers")
    return code or (ExitCode.EXHAUSTED if told.left else ExitCode.OK)


def _about(client: Client, tenant: str) -> tuple[int, int]:
    """Namespaces and pages of a tenant, each page once for each node that has it."""
    infos = [info for namespace, info in client.namespaces() if namespace.tenant == tenant]
    return len(infos), sum(map(page_count, infos))
