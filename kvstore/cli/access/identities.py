"""Run `kvstore identities push`: give all members the same file of identities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import DIGITS, at_each, report_failures
from kvstore.cli.output import emit, note, show_fitting
from kvstore.cli.selection import read_input
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.results import PushedIdentities
from kvstore.security import identities

CONTENT_NBYTES_MAX = 1 << 20  # bytes of a file that is pushed, so that it fits a message
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The file of identities; - is stdin.")
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Even if you, or members of the cluster, lose rights by it."),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only report what would change.")]


def push(
    run: Invocation, file: FileArgument, force: ForceOption = False, dry_run: DryOption = False
) -> int:
    """Replace the identities file of all members.

    For administrators of all tenants, at nodes with --identities-writable. Each member validates
    the file first; if one refuses it, none is changed. Exit 3 if a member does not answer: push
    again when it does. `kvstore cluster` shows the digest of each member's file.

    \b
    Examples:
      kvstore identities push identities --dry-run
      kvstore identities push identities
    """
    content = read_input(file, CONTENT_NBYTES_MAX)
    _check(file, content)

    def pushes(check: bool) -> Any:
        def push_to(client: Client, member: str) -> PushedIdentities:
            return client.push_identities(content, force, check, timeout_s=run.timeout_s)

        done, away = at_each(run, push_to)
        for member, error in (away or {}).items():
            if check and not isinstance(error, (Unavailable, DeadlineExceeded)):
                raise type(error)(f"{member}: {error}; no member is changed") from error
        return done, away

    done, away = pushes(check=True)
    if not dry_run:
        done, away = pushes(check=False)
    rows = [
        {"member": member, "digest": reply.digest.hex(), "added": list(reply.added)}
        | {"removed": list(reply.removed)}
        for member, reply in done.items()
    ]
    if run.as_json:
        emit({"dry_run": dry_run, "members": rows, "away": sorted(away or {})})
    else:
        _show(rows, dry_run)
    return report_failures(away, "; push again when it answers") or ExitCode.OK


def _check(file: Path, content: bytes) -> None:
    """Raise InvalidRequest for a file that no node would take."""
    found = identities.parse(content.decode(errors="replace"))
    if found.problems:
        raise InvalidRequest(f"{file}, {found.problems[0]}; nothing is pushed")
    if not found.count:
        raise InvalidRequest(f"{file} names no identity: nobody could use the nodes")


def _show(rows: Sequence[dict[str, Any]], dry_run: bool) -> None:
    table = [
        (
            row["member"] or "-",
            row["digest"][:DIGITS],
            " ".join(row["added"]) or "-",
            " ".join(row["removed"]) or "-",
        )
        for row in rows
    ]
    show_fitting(("MEMBER", "IDENTITIES", "ADDED", "REMOVED"), table)
    if dry_run:
        note("nothing is changed; push without --dry-run to put the file in force")
