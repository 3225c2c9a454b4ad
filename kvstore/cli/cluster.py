"""Run `kvstore cluster`: members, owners, drain, rebalance; and `kvstore status`."""

import time
from itertools import chain
from typing import Annotated

import typer

from kvstore.admin import summed
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import (
    COLUMNS,
    Statuses,
    answers,
    at_each,
    away_json,
    headline,
    lost_members,
    lost_rows,
    members_json,
    merge_events,
    report_failures,
    rows,
    sums,
    troubled_first,
    troubles,
)
from kvstore.cli.nodes import namespace_json, show_namespaces, show_status
from kvstore.cli.output import (
    console,
    emit,
    human_nbytes,
    note,
    printable,
    progress,
    show,
    show_fitting,
    show_keyed,
)
from kvstore.cli.selection import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TokensFileOption,
    TokensOption,
    find_keys,
    find_namespace,
    option_seconds,
)
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.cluster.view import REGISTRIES, Member, View
from kvstore.doctor.pages import hints
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.results import Events, SweepResult
from kvstore.security.certificates import date

# Rows of members and namespaces on one screen of 24 lines; `kvstore cluster` and `kvstore ls` show
# all.
ROWS = 11

LOOK_S = 0.5

MemberArgument = Annotated[
    str, typer.Argument(metavar="MEMBER", help="Its id; see `kvstore cluster`.")
]
EndOption = Annotated[bool, typer.Option("--end", help="Cancel the drain.")]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="DURATION", help="Only the last 90s, 30m, 1h or 7d.")
]
EVENTS_LIMIT = typer.Option("--limit", metavar="N", help="Only the newest N; 0: all.")
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only report what would be moved.")]
MEMBER_ROWS, NAMESPACE_ROWS_MIN = 8, 2


def cluster(run: Invocation) -> int:
    """Show the members of the cluster.

    State, share of the keys, hit rate, RAM, disk and queues of each. Columns that do not fit the
    terminal are left out; in a pipe all are there. LOST members left without a drain. Exit 3 if a
    member is lost or does not answer.

    \b
    Examples:
      kvstore cluster -a node1:7440
      kvstore cluster --json | jq '.members[] | select(.answers | not)'
      kvstore cluster owners 9c0d41
    """
    with run.client() as client:
        statuses = client.statuses()
        view = view_of(client)
    if run.as_json:
        emit(members_json(view, statuses))
    else:
        _show(view, statuses, len(view.members))
    missing = len(answers(statuses)) < len(statuses) or lost_members(statuses)
    return ExitCode.UNAVAILABLE if missing else ExitCode.OK


def forget_member(run: Invocation, member: MemberArgument) -> int:
    """Stop reporting a lost member.

    For one that left without a drain and will not return. Its pages are those of the other owners
    already. A member that starts again is expected again.

    \b
    Example:
      kvstore cluster forget-member n3
    """
    with run.client() as client:
        view = view_of(client)
    for number, some in enumerate(view.members, 1):
        try:
            with run.client(address=some.address, direct=True) as client:
                client.forget_member(member)
            break
        except (Unavailable, DeadlineExceeded):
            if number == len(view.members):
                raise
    if run.as_json:
        emit({"member": member, "forgotten": True})
    else:
        print(f"{member} is not missed any more")
    return ExitCode.OK


def events(
    run: Invocation, since: SinceOption = "7d", limit: Annotated[int, EVENTS_LIMIT] = 0
) -> int:
    """Show what happened to the members.

    They joined, were lost or drained, a disk stopped, and more. Each member keeps the newest 1,024,
    over a restart if it has a data directory. An event that several members saw is shown once. Also
    for a single node. Exit 3 if a member does not answer.

    \b
    Examples:
      kvstore cluster events --since 2h
      kvstore cluster events --json | jq '.events[] | select(.kind == "lost")'
    """
    since_unix_ms = round(1000 * (time.time() - option_seconds(since)))
    if limit < 0:
        raise InvalidRequest(f"--limit {limit} is below 0; write how many events to show")
    with run.client() as client:
        replies = client.events(since_unix_ms)
        view = client.view()
    names = {member.address: member.id for member in view.members} if view else {}
    found = {names.get(at, at) if view else "": reply for at, reply in replies.items()}
    away: Away = {name: reply for name, reply in found.items() if isinstance(reply, KVStoreError)}
    answered = {name: reply for name, reply in found.items() if isinstance(reply, Events)}
    if not answered:
        raise next(iter(away.values()))
    merged = merge_events(answered)[-limit:]
    if run.as_json:
        emit({"events": merged, **away_json(away if view else None)})
    elif not merged:
        note(f"no events since {date(since_unix_ms / 1000)}; --since 30d goes further back")
    else:
        show_fitting(
            ("TIME (UTC)", "EVENT", "MEMBER", "WHAT", "SEEN BY"),
            [
                (
                    date(event["unix_ms"] / 1000).removesuffix(" UTC"),
                    event["kind"],
                    event["member"] or "-",
                    event["text"],
                    " ".join(event["seen_by"]) or "-",
                )
                for event in merged
            ],
            prose="WHAT",
        )
    forgetful = sorted(name or "this node" for name, reply in answered.items() if not reply.kept)
    if forgetful:
        note(f"without a data directory, events since the last start only: {', '.join(forgetful)}")
    return report_failures(away)


def owners(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
) -> int:
    """Show which members own these keys, the first one first.

    \b
    Examples:
      kvstore cluster owners 9c0d41
      kvstore cluster owners --model llama-3-8b --tokens-file prompt.txt --json
    """
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        view = view_of(client)
        found = view.owners.owners(space.digest, hashes)
    rows = [(prefix_hash.hex(), *some) for prefix_hash, some in zip(hashes, found, strict=True)]
    if run.as_json:
        owned = [{"prefix_hash": key, "owners": some} for key, *some in rows]
        emit({"namespace": space.digest.hex(), "keys": owned})
    else:
        show_keyed(
            ("KEY", "OWNERS"),
            [
                (key, " ".join(f"{some} ({view.by_id[some].address})" for some in of))
                for key, *of in rows
            ],
            fold=True,
        )
    return ExitCode.OK


def drain(run: Invocation, member: MemberArgument, end: EndOption = False) -> int:
    """Move a member's pages to their next owners.

    Returns when that is done; then the member can be stopped.

    Meanwhile it serves reads and takes no new pages. If this command is interrupted, the drain
    continues; run it again to see its progress. Exit 4 if pages are left that no member takes.

    \b
    Examples:
      kvstore cluster drain n3
      kvstore cluster drain n3 --end
    """
    with run.client(address=_member(run, member).address, direct=True) as client:
        told = client.drain(end)
        registry = client.node_status().peers.registry
        if registry not in REGISTRIES:
            note(f"other members learn of it when etcd answers again: {registry}")
        with progress(f"draining {member}", 1.0) as report:
            while not (end or told.over):
                count = told.pages_handed + told.pages_left
                report(told.pages_handed / count if count else 0.0)
                time.sleep(LOOK_S)
                told = client.drain()
    if run.as_json:
        emit(
            {"member": member, "handed": told.pages_handed, "left": told.pages_left, "serves": end}
        )
    elif end:
        print(f"{member} serves again")
    else:
        print(
            f"{member}: {told.pages_handed:,} pages are with their owners, {told.pages_left:,} are "
            "not"
        )
    if told.pages_left and not end:
        note(
            "no member accepted the remaining pages: add members or memory and drain it "
            "again, or stop it and lose these pages"
        )
        return ExitCode.EXHAUSTED
    return ExitCode.OK


def rebalance(run: Invocation, dry_run: DryOption = False) -> int:
    """Have each member fetch the pages that it owns and lacks.

    They do so by themselves when the view changes.

    Exit 3 if a member does not answer.

    \b
    Examples:
      kvstore cluster rebalance --dry-run
      kvstore cluster rebalance
    """

    def sweep(client: Client, member: str) -> SweepResult:
        if not member:
            view_of(client)
        with progress(f"asking {member}", 1.0) as report:
            told = client.sweep(dry_run, timeout_s=run.patient_s)
            report(1.0)
        return told

    done, away = at_each(run, sweep)
    rows = [
        (member, told.pages_missing, told.nbytes_missing, list(told.away))
        for member, told in done.items()
    ]
    if run.as_json:
        names = ("member", "pages", "nbytes", "away")
        members = [dict(zip(names, row, strict=True)) for row in rows]
        emit({"dry_run": dry_run, "members": members, **away_json(away)})
    elif dry_run:
        show(
            ("MEMBER", "WOULD FETCH", "BYTES", "NOT REACHED"),
            [
                (member, f"{pages:,}", human_nbytes(nbytes), " ".join(of) or "-")
                for member, pages, nbytes, of in rows
            ],
        )
    else:
        print(
            f"{len(rows)} members rebalance; `kvstore cluster rebalance --dry-run` shows "
            "what is left"
        )
    incomplete = any(told.away for told in done.values())
    return report_failures(away) or (ExitCode.UNAVAILABLE if incomplete else ExitCode.OK)


def status(run: Invocation) -> None:
    """Show the node or the cluster, and the namespaces.

    A cluster is one screen; `kvstore cluster` has all members, and exit 3 if one does not answer.

    Misses are counted by reason. A namespace that never hits gets a hint: usually its layout,
    revision, data type, TP size or salt differs from that of the namespace that holds the pages.

    \b
    Examples:
      kvstore status
      kvstore status -a node7:7440 --json | jq .ram.used_nbytes
      kvstore status --direct -a node7:7440
    """
    with run.client() as client:
        if client.view() is None:
            show_status(run, client)
        else:
            show_cluster_status(run, client)


def show_cluster_status(run: Invocation, client: Client) -> None:
    """Show a cluster on one screen: its members, and the namespaces over all of them."""
    statuses = client.statuses()
    view = view_of(client)
    known = summed(chain.from_iterable(status.namespaces for status in answers(statuses)))
    found = hints(known)
    if run.as_json:
        namespaces = [namespace_json(namespace, info) for namespace, info in known]
        emit({**members_json(view, statuses), "namespaces": namespaces, "hints": found})
        return
    _show(view, statuses, MEMBER_ROWS)
    if known:
        console().print()
        show_namespaces(known, max(NAMESPACE_ROWS_MIN, ROWS - len(view.members)), copies=True)
    for hint in found:
        note(f"hint: {hint}")


def _show(view: View, statuses: Statuses, count: int) -> None:
    out = console()
    for line in (headline(view, statuses), *sums(view, statuses)):
        out.print(printable(line), markup=False, soft_wrap=True)
    members = (
        view.members
        if count >= len(view.members)
        else troubled_first(view.members, statuses)[:count]
    )
    show_fitting(COLUMNS, [*rows(view, members, statuses), *lost_rows(statuses)])
    if len(members) < len(view.members):
        out.print(
            f"and {len(view.members) - len(members):,} more members: kvstore cluster", markup=False
        )
    for line in troubles(view, statuses):
        note(line)


def view_of(client: Client) -> View:
    """Return the cluster's view. Raises Failure for a node without a cluster."""
    view = client.view()
    if view is None:
        raise Failure(
            f"the node at {client.config.address} is in no cluster; kvstore status shows it",
            ExitCode.USAGE,
        )
    return view


def _member(run: Invocation, name: str) -> Member:
    with run.client() as client:
        view = view_of(client)
    if name not in view.by_id:
        raise Failure(
            f"{name!r} is no member of {view.cluster}; its members are "
            f"{', '.join(sorted(view.by_id))}; kvstore cluster also shows those that are lost"
        )
    return view.by_id[name]
