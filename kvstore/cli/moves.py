"""Commands that move pages between the members of a cluster: drain, rebalance."""

import time
from typing import Annotated

import typer

from kvstore.cli.cluster import view_of
from kvstore.cli.everywhere import at_each, away_json, without
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, human_nbytes, note, progress, show
from kvstore.client import Client
from kvstore.cluster.view import REGISTRIES, Member
from kvstore.pb import kvstore_pb2 as pb

LOOK_S = 0.5
MemberArgument = Annotated[str, typer.Argument(metavar="MEMBER", help="Its id; see `kvstore cluster`.")]
EndOption = Annotated[bool, typer.Option("--end", help="It serves again.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be moved.")]


def drain(run: Invocation, member: MemberArgument, end: EndOption = False) -> int:
    """Hand a member's pages to who owns them without it. Returns when that is over; then it can be stopped.

    It is asked for its pages meanwhile, and given no new ones. Interrupted, the draining goes on; run it again to
    see how far it is. Exit 4 if pages are left that nobody takes.

    \b
    Examples:
      kvstore cluster drain n3
      kvstore cluster drain n3 --end
    """
    with run.client(address=_member(run, member).address, direct=True) as client:
        told = client.drain(end)
        registry = client.node_status().peers.registry
        if registry not in REGISTRIES:
            note(f"nobody hears of it before etcd can be asked again: {registry}")
        with progress(f"draining {member}", 1.0) as report:
            while not (end or told.over):
                count = told.pages_handed + told.pages_left
                report(told.pages_handed / count if count else 0.0)
                time.sleep(LOOK_S)
                told = client.drain()
    if run.as_json:
        emit({"member": member, "handed": told.pages_handed, "left": told.pages_left, "serves": end})
    elif end:
        print(f"{member} serves again")
    else:
        print(f"{member}: {told.pages_handed:,} pages are with their owners, {told.pages_left:,} are not")
    if told.pages_left and not end:
        note("nobody has taken what is left: add members or memory and drain it again, or stop it and lose these pages")
        return ExitCode.EXHAUSTED
    return ExitCode.OK


def rebalance(run: Invocation, dry_run: DryOption = False) -> int:
    """Have each member fetch the pages that it owns and others have. They do so by themselves when the view changes.

    Exit 3 if a member does not answer.

    \b
    Examples:
      kvstore cluster rebalance --dry-run
      kvstore cluster rebalance
    """

    def sweep(client: Client, member: str) -> pb.SweepReply:
        if not member:
            view_of(client)
        with progress(f"asking {member}", 1.0) as report:
            told = client.sweep(dry_run, timeout_s=run.patient_s)
            report(1.0)
        return told

    done, away = at_each(run, sweep)
    rows = [(member, told.pages_missing, told.nbytes_missing, list(told.away)) for member, told in done.items()]
    if run.as_json:
        names = ("member", "pages", "nbytes", "away")
        members = [dict(zip(names, row, strict=True)) for row in rows]
        emit({"dry_run": dry_run, "members": members, **away_json(away)})
    elif dry_run:
        show(
            ("MEMBER", "WOULD FETCH", "BYTES", "COULD NOT ASK"),
            [(member, f"{pages:,}", human_nbytes(nbytes), " ".join(of) or "-") for member, pages, nbytes, of in rows],
        )
    else:
        print(f"{len(rows)} members look for their pages; `kvstore cluster rebalance --dry-run` says what is left")
    incomplete = any(told.away for told in done.values())
    return without(away) or (ExitCode.UNAVAILABLE if incomplete else ExitCode.OK)


def _member(run: Invocation, name: str) -> Member:
    with run.client() as client:
        view = view_of(client)
    if name not in view.by_id:
        raise Failure(f"{name!r} is no member of {view.cluster}; its members are {', '.join(sorted(view.by_id))}")
    return view.by_id[name]
