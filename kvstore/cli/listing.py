"""`kvstore ls`: namespaces, or the pages of one."""

from itertools import islice
from typing import Annotated, Any

import typer

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.nodes import namespace_json, page_columns
from kvstore.cli.output import emit, human_ms, human_nbytes, note, plain, show, show_fitting
from kvstore.cli.selection import ModelOption, NamespaceOption, check_hex, find_namespace, list_pages
from kvstore.client import Client
from kvstore.doctor.hints import page_count
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb

LIST_COUNT = 1000  # pages that `ls` shows unless told otherwise


def ls(
    run: Invocation,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="HEX", help="Only keys that start like this.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most N pages; 0: all.")] = LIST_COUNT,
) -> int:
    """List namespaces, or the pages of one.

    Pages come in the order of their keys. Exit 1 if there is nothing to list.

    \b
    Examples:
      kvstore ls
      kvstore ls -n 3fa2 --limit 20
      kvstore ls --model llama-3-8b --prefix 9c --json | jq -r '.[].prefix_hash'
    """
    with run.client() as client:
        if namespace is None and model is None:
            if prefix:
                raise InvalidRequest("--prefix needs a namespace: add --namespace or --model")
            return _ls_namespaces(client, run.as_json)
        if limit < 0:
            raise InvalidRequest(f"--limit {limit} is negative; 0 lists all pages")
        if prefix:
            check_hex(prefix, "--prefix")
        space, _ = find_namespace(client, namespace, model)
        found = list_pages(client, space, prefix.lower())
        pages = list(islice(found, limit or None))
        cut = bool(limit) and next(found, None) is not None
    if run.as_json:
        emit([plain(page) for page in pages])
    else:
        show_pages(pages)
    if cut:
        note(f"only the first {limit} pages are listed; --limit 0 lists all")
    return ExitCode.OK if pages else ExitCode.MISS


def _ls_namespaces(client: Client, as_json: bool) -> int:
    known = client.namespaces()
    if as_json:
        emit([namespace_json(space, info) for space, info in known])
    else:
        columns = (
            "NAMESPACE",
            "MODEL",
            "TENANT",
            "REVISION",
            "SALT",
            "SHARD",
            ">TOKENS",
            ">PAGE",
            *page_columns(copies=client.view() is not None),
        )
        fullest_first = sorted(known, key=lambda entry: -page_count(entry[1]))
        show_fitting(columns, [_namespace_row(space, info) for space, info in fullest_first])
    return ExitCode.OK if known else ExitCode.MISS


def _namespace_row(space: Namespace, info: pb.NamespaceInfo) -> tuple[Any, ...]:
    axes = (
        ("tp", space.tp_rank, space.tp_size),
        ("pp", space.pp_rank, space.pp_size),
        ("cp", space.cp_rank, space.cp_size),
    )
    shard = " ".join(f"{axis}{rank}/{size}" for axis, rank, size in axes if size > 1)
    tokens, page = space.layout.page_tokens, human_nbytes(info.page_nbytes)
    names = (space.model, space.tenant, space.revision, space.salt)
    return (space.digest.hex(), *names, shard, tokens, page, info.page_count, info.disk_page_count)


def show_pages(pages: list[pb.PageStat]) -> None:
    rows = [
        (
            page.prefix_hash.hex(),
            _state(page),
            human_nbytes(page.nbytes),
            human_ms(page.age_ms) if page.age_ms else "",
            human_ms(page.idle_ms),
            human_ms(page.ttl_ms) if page.ttl_ms else "",
            human_ms(page.pin_ttl_ms) if page.pin_ttl_ms else "",
            page.holds,
        )
        for page in pages
    ]
    show(("KEY", "WHERE", ">SIZE", ">AGE", ">IDLE", ">TTL", ">PINNED", ">READERS"), rows)


def _state(page: pb.PageStat) -> str:
    """Where the page is: 'ram', 'disk', 'ram+disk'; or 'writing', 'absent'."""
    tiers = "+".join(name for name, there in (("ram", page.in_ram), ("disk", page.on_disk)) if there)
    return tiers or ("writing" if page.writing else "absent")
