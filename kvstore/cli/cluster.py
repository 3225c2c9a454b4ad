"""`kvstore cluster`: the members of a cluster and what they have; whose a key is."""

from typing import Any

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.hints import hints
from kvstore.cli.invocation import Invocation
from kvstore.cli.nodes import namespace_json, show_namespaces
from kvstore.cli.output import console, emit, human_ms, human_nbytes, note, percent, plain, show
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
from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb


def cluster(run: Invocation) -> int:
    """Show the members of the cluster: state, share of the keys, RAM, disk and hit rate.

    Exit 3 if one of them does not answer.

    \b
    Examples:
      kvstore cluster -a node1:7440
      kvstore cluster --json | jq '.members[] | select(.answers | not)'
      kvstore cluster owners 9c0d41
    """
    with run.client() as client:
        statuses = client.statuses()
        view = _view(client)
        if run.as_json:
            emit({"cluster": view.cluster, "view": view.number, "members": _members_json(view, statuses)})
        else:
            show_cluster(view, statuses)
    away = [address for address, status in statuses.items() if isinstance(status, KVStoreError)]
    return ExitCode.UNAVAILABLE if away else ExitCode.OK


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
        view = _view(client)
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


def show_cluster(view: View, statuses: dict[str, pb.NodeStatusReply | KVStoreError]) -> None:
    weight = sum(member.weight for member in view.members)
    answer = [status for status in statuses.values() if not isinstance(status, KVStoreError)]
    out = console()
    out.print(
        f"cluster {view.cluster}  view {view.number}  members {len(view.members)}, {len(answer)} answer",
        markup=False,
        soft_wrap=True,
    )
    rows: list[tuple[Any, ...]] = []
    for member in view.members:
        status = statuses.get(member.address)
        share = percent(member.weight, weight)
        about = (member.id, member.address, member.zone or "-", member.state.name.lower(), share)
        if not isinstance(status, pb.NodeStatusReply):
            rows.append((*about, "DOES NOT ANSWER", *("-",) * 5))
            continue
        ram, disk, totals = status.ram, status.disk, status.totals
        rows.append(
            (
                *about,
                status.state,
                human_ms(status.uptime_ms),
                f"{human_nbytes(ram.used_nbytes)} of {human_nbytes(ram.capacity_nbytes)}",
                f"{human_nbytes(disk.used_nbytes)} of {human_nbytes(disk.capacity_nbytes)}" if disk.state else "-",
                ram.page_count,
                percent(totals.prefix_hits, totals.pages_asked),
            )
        )
    show(("MEMBER", "ADDRESS", "ZONE", "IS", ">SHARE", "NODE", ">UP", ">RAM", ">DISK", ">PAGES", ">HIT"), rows)
    for address, status in statuses.items():
        if isinstance(status, KVStoreError):
            note(f"{address}: {status}")


def show_cluster_status(run: Invocation, client: Client) -> None:
    """What `kvstore status` shows of a cluster: members, and namespaces over all of them."""
    view, statuses = _view(client), client.statuses()
    known = client.namespaces()
    found = hints(known)
    if run.as_json:
        members = _members_json(view, statuses)
        namespaces = [namespace_json(namespace, info) for namespace, info in known]
        emit(
            {"cluster": view.cluster, "view": view.number, "members": members, "namespaces": namespaces, "hints": found}
        )
        return
    show_cluster(view, statuses)
    if known:
        console().print()
        show_namespaces(known)
    for hint in found:
        note(f"hint: {hint}")


def _members_json(view: View, statuses: dict[str, pb.NodeStatusReply | KVStoreError]) -> list[dict[str, Any]]:
    members = []
    for member in view.members:
        status = statuses.get(member.address)
        answers = isinstance(status, pb.NodeStatusReply)
        members.append(
            {
                "id": member.id,
                "address": member.address,
                "weight": member.weight,
                "zone": member.zone,
                "state": member.state.name,
                "answers": answers,
                "error": "" if answers else str(status),
                "status": plain(status) if answers else None,
            }
        )
    return members


def _view(client: Client) -> View:
    view = client.view()
    if view is None:
        raise Failure(f"the node at {client.config.address} is in no cluster; kvstore status shows it", ExitCode.USAGE)
    return view
