"""`kvstore cluster`: the members of a cluster and what they have; whose a key is. `kvstore status` of a cluster."""

from itertools import chain

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import COLUMNS, Statuses, answers, headline, members_json, rows, sums, troubled_first, troubles
from kvstore.cli.nodes import namespace_json, show_namespaces
from kvstore.cli.output import console, emit, note, show, show_fitting
from kvstore.cli.selection import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TokensFileOption,
    TokensOption,
    find_keys,
    find_namespace,
)
from kvstore.client import Client
from kvstore.cluster.view import View
from kvstore.doctor.hints import hints
from kvstore.management import summed

# One screen of 24 lines has so many rows of members and namespaces; `kvstore cluster` and `kvstore ls` show all.
ROWS = 11
MEMBER_ROWS, NAMESPACE_ROWS_MIN = 8, 2


def cluster(run: Invocation) -> int:
    """Show the members of the cluster: state, share of the keys, hit rate, RAM, disk, what waits for others.

    Columns that do not fit the terminal are left out; in a pipe all are there. Exit 3 if a member does not answer.

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
    return ExitCode.UNAVAILABLE if len(answers(statuses)) < len(statuses) else ExitCode.OK


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
        emit([{"prefix_hash": key, "owners": some} for key, *some in rows])
    else:
        show(
            ("KEY", "OWNERS"),
            [(key, " ".join(f"{some} ({view.by_id[some].address})" for some in of)) for key, *of in rows],
        )
    return ExitCode.OK


def show_cluster_status(run: Invocation, client: Client) -> None:
    """What `kvstore status` shows of a cluster, on one screen: members, and namespaces over all of them."""
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
        out.print(line, markup=False, soft_wrap=True)
    members = view.members if count >= len(view.members) else troubled_first(view.members, statuses)[:count]
    show_fitting(COLUMNS, rows(view, members, statuses))
    if len(members) < len(view.members):
        out.print(f"and {len(view.members) - len(members):,} more members: kvstore cluster", markup=False)
    for line in troubles(view, statuses):
        note(line)


def view_of(client: Client) -> View:
    view = client.view()
    if view is None:
        raise Failure(f"the node at {client.config.address} is in no cluster; kvstore status shows it", ExitCode.USAGE)
    return view
