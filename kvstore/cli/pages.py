"""Run the commands on pages that move no bytes: ls, stat, lookup, rm, verify, pin, unpin."""

import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import away_json, lost_away, report_failures
from kvstore.cli.nodes import namespace_json, page_columns
from kvstore.cli.output import emit, human_ms, human_nbytes, note, progress, show_keyed
from kvstore.cli.selection import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TokensFileOption,
    TokensOption,
    all_keys,
    check_hex,
    find_keys,
    find_namespace,
    list_pages,
    option_seconds,
    pieces,
)
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.doctor.pages import page_count
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.messages import plain
from kvstore.results import NamespaceInfo, PageStat

LIST_COUNT = 1000  # pages that `ls` shows by default
# Page bytes that one request makes the node hash: a tenth of a second, far below any deadline.
VERIFY_NBYTES = 1 << 30

AllOption = Annotated[
    bool, typer.Option("--all", help="All pages of the namespace, which must be named.")
]


FullOption = Annotated[
    bool, typer.Option("--full", help="Whole keys, also where they do not fit the terminal.")
]


def ls(
    run: Invocation,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="HEX", help="Only keys that start like this.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="At most N pages; 0: all.")
    ] = LIST_COUNT,
    full: FullOption = False,
) -> int:
    """List namespaces, or the pages of one.

    Pages come in the order of their keys. Exit 1 if there is nothing to list.

    \b
    Examples:
      kvstore ls
      kvstore ls -n 3fa2 --limit 20
      kvstore ls -m llama-3-8b --prefix 9c --json | jq -r '.pages[].prefix_hash'
    """
    if limit < 0:
        raise InvalidRequest(f"--limit {limit} is negative; 0 lists all pages")
    with run.client() as client:
        if namespace is None and model is None:
            if prefix:
                raise InvalidRequest("--prefix needs a namespace: add --namespace or --model")
            return _ls_namespaces(client, run.as_json, full)
        if prefix:
            check_hex(prefix, "--prefix")
        space, _ = find_namespace(client, namespace, model)
        found = list_pages(client, space, prefix.lower())
        pages = list(islice(found, limit or None))
        cut = bool(limit) and next(found, None) is not None
    if run.as_json:
        listed = [plain(page) for page in pages]
        emit({"namespace": space.digest.hex(), "pages": listed, "more": cut})
    else:
        show_pages(pages, full)
    if cut:
        note(f"only the first {limit} pages are listed; --limit 0 lists all")
    return ExitCode.OK if pages else ExitCode.MISS


def _ls_namespaces(client: Client, as_json: bool, full: bool) -> int:
    known = client.namespaces()
    if as_json:
        emit({"namespaces": [namespace_json(space, info) for space, info in known]})
    else:
        columns = (
            "NAMESPACE",
            "MODEL",
            "TENANT",
            *page_columns(copies=client.view() is not None),
            ">PAGE",
            ">TOKENS",
            "REVISION",
            "SALT",
            "SHARD",
        )
        fullest_first = sorted(known, key=lambda entry: -page_count(entry[1]))
        rows = [_namespace_row(space, info) for space, info in fullest_first]
        show_keyed(columns, rows, full)
    return ExitCode.OK if known else ExitCode.MISS


def _namespace_row(space: Namespace, info: NamespaceInfo) -> tuple[Any, ...]:
    axes = (
        ("tp", space.tp_rank, space.tp_size),
        ("pp", space.pp_rank, space.pp_size),
        ("cp", space.cp_rank, space.cp_size),
    )
    shard = " ".join(f"{axis}{rank}/{size}" for axis, rank, size in axes if size > 1)
    tokens, page = space.layout.page_tokens, human_nbytes(info.page_nbytes)
    names, counts = (space.model, space.tenant), (info.page_count, info.disk_page_count)
    return (space.digest.hex(), *names, *counts, page, tokens, space.revision, space.salt, shard)


def show_pages(pages: list[PageStat], full: bool = False) -> None:
    """Print a table of pages; `full` keeps whole keys on a narrow terminal."""
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
    columns = ("KEY", "WHERE", ">SIZE", ">AGE", ">IDLE", ">TTL", ">PINNED", ">READERS")
    show_keyed(columns, rows, full)


def _state(page: PageStat) -> str:
    """Return where the page is: 'ram', 'disk', 'ram+disk', 'writing' or 'absent'."""
    tiers = "+".join(
        name for name, there in (("ram", page.in_ram), ("disk", page.on_disk)) if there
    )
    return tiers or ("writing" if page.writing else "absent")


def stat(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    full: FullOption = False,
) -> int:
    """Show single pages: state, size, age, pin.

    With --json also the checksum. Exit 1 if none of them is stored.

    \b
    Examples:
      kvstore stat 9c0d41
      kvstore stat -n 3fa2 --tokens-file prompt.txt --json
    """
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        pages = client.stat(space, hashes)
    if run.as_json:
        emit({"namespace": space.digest.hex(), "pages": [plain(page) for page in pages]})
    else:
        show_pages(pages, full)
    return ExitCode.OK if any(page.present for page in pages) else ExitCode.MISS


def lookup(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
) -> int:
    """Find the longest stored prefix of a prompt.

    The prompt is given as tokens or as keys, head first. Does not count as a use of the pages.
    Exit 1 if not even the first page is stored.

    \b
    Examples:
      kvstore lookup --model llama-3-8b --tokens-file prompt.txt
      kvstore lookup -n 3fa2 --tokens 1,2,3,4 --json
      cat ids.json | kvstore lookup --tokens-file -
    """
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        found = client.lookup(space, hashes)
    covered = found.prefix_pages * space.layout.page_tokens
    if run.as_json:
        pages = [
            {"prefix_hash": h.hex(), "present": present}
            for h, present in zip(hashes, found.present, strict=True)
        ]
        emit(
            {
                "namespace": space.digest.hex(),
                "prefix_pages": found.prefix_pages,
                "tokens_covered": covered,
                "page_tokens": space.layout.page_tokens,
                "pages_present": sum(found.present),
                "pages": pages,
            }
        )
    else:
        print(
            f"prefix {found.prefix_pages} of {len(hashes)} pages, {covered} tokens; "
            f"{sum(found.present)} pages stored in all"
        )
    return ExitCode.OK if found.prefix_pages else ExitCode.MISS


def rm(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    every: AllOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> int:
    """Remove pages, pinned ones too.

    Exit 1 if none of them was stored, 3 if a member of a cluster is lost or does not answer.

    \b
    Examples:
      kvstore rm -n 3fa2 9c0d41 77ab02
      kvstore rm --model llama-3-8b --tokens-file prompt.txt
      kvstore rm --model llama-3-8b --all --yes
    """
    away: Away = {}
    with run.client() as client:
        chosen = _choose(client, keys, namespace, model, tokens, tokens_file, every)
        space = chosen.namespace
        if every and not yes:
            confirm(
                f"Remove all {chosen.about} pages of {space.model} [{space.digest.hex()[:12]}]?"
            )
        removed = asked = 0
        with progress("removing", chosen.about) as report:
            for piece in pieces(chosen.keys):
                removed += sum(client.remove(space, piece, away=away))
                asked += len(piece)
                report(asked)
        alone = client.view() is None
        if not alone:
            away = {**lost_away(client), **away}
    if run.as_json:
        counts = {"removed": removed, "absent": asked - removed}
        emit({"namespace": space.digest.hex(), **counts, **away_json(None if alone else away)})
    else:
        print(f"removed {removed} of {asked} pages")
    code = report_failures(away, "; its copies may return: remove them again when it answers")
    return code or (ExitCode.OK if removed else ExitCode.MISS)


def verify(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    every: AllOption = False,
) -> int:
    """Let the node check pages for damage.

    It compares them with their checksums and drops those that do not match.

    Exit 5 if a page was corrupt, 3 if a member of a cluster does not answer, 1 if none of the pages
    is stored.

    \b
    Examples:
      kvstore verify -n 3fa2 9c0d41
      kvstore verify --model llama-3-8b --all
    """
    intact = dropped = absent = 0
    away: Away = {}
    with run.client() as client:
        chosen = _choose(client, keys, namespace, model, tokens, tokens_file, every)
        space = chosen.namespace
        count_max = max(1, VERIFY_NBYTES // space.stored_nbytes)
        with progress("verifying", chosen.about) as report:
            for piece in pieces(chosen.keys, count_max):
                reply = client.verify(space, piece, away=away)
                intact, dropped = intact + reply.intact, dropped + reply.dropped
                absent += reply.absent
                report(intact + dropped + absent)
        alone = client.view() is None
    if run.as_json:
        counts = {"intact": intact, "dropped": dropped, "absent": absent, "pages": []}
        emit({"namespace": space.digest.hex(), **counts, **away_json(None if alone else away)})
    else:
        print(f"{intact} pages intact, {dropped} corrupt and dropped, {absent} not stored")
    code = report_failures(away)
    if dropped:
        return ExitCode.CORRUPT
    return code or (ExitCode.OK if intact else ExitCode.MISS)


def _about(client: Client, info: NamespaceInfo) -> int:
    """Estimate a namespace's pages; in a cluster each page lies at as many members as replicas."""
    view = client.view()
    return page_count(info) // min(view.replicas, len(view.members)) if view else page_count(info)


class _Chosen(NamedTuple):
    """The pages that a command with --all is about; `about`: their number, for a progress bar."""

    namespace: Namespace
    keys: Iterable[bytes]
    about: int


def _choose(
    client: Client,
    keys: list[str] | None,
    namespace: str | None,
    model: str | None,
    tokens: str | None,
    tokens_file: Path | None,
    every: bool,
) -> _Chosen:
    """Find the pages that the options name; with --all the namespace must be named."""
    if every and (keys or tokens is not None or tokens_file is not None):
        raise InvalidRequest("give keys or tokens, or --all, not both")
    if every and namespace is None and model is None:
        raise InvalidRequest("--all needs the namespace: add --namespace or --model")
    if not (every or keys or tokens is not None or tokens_file is not None):
        raise InvalidRequest("name pages by KEY or by --tokens/--tokens-file, or all by --all")
    space, info = find_namespace(client, namespace, model)
    if every:
        return _Chosen(space, all_keys(client, space), _about(client, info))
    hashes = find_keys(client, space, keys, tokens, tokens_file)
    return _Chosen(space, hashes, len(hashes))


def confirm(question: str) -> None:
    """Ask for confirmation. Raises InvalidRequest without a terminal, Failure for a no."""
    if not sys.stdin.isatty():
        raise InvalidRequest(f"{question} There is no terminal to confirm on; add --yes")
    if not typer.confirm(question, err=True):
        raise Failure("nothing was removed", ExitCode.USAGE)


def pin(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="How long: 90s, 30m, 1h, 7d.")
    ] = "1h",
) -> int:
    """Keep pages from being evicted for a time.

    Exit 1 if none of them is stored.

    A new pin replaces the old one. Pinned pages can still be removed.

    \b
    Examples:
      kvstore pin -n 3fa2 9c0d41 --ttl 1h
      kvstore pin --model llama-3-8b --tokens-file system_prompt.txt --ttl 7d
    """
    ttl_s = option_seconds(ttl)
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        done = client.pin(space, hashes, ttl_s)
    if run.as_json:
        emit(
            {
                "namespace": space.digest.hex(),
                "ttl_s": ttl_s,
                "pinned": sum(done),
                "pages": _verdicts(hashes, done, "pinned"),
            }
        )
    else:
        print(f"pinned {sum(done)} of {len(done)} pages for {human_ms(ttl_s * 1000)}")
    return ExitCode.OK if any(done) else ExitCode.MISS


def unpin(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
) -> int:
    """Let pinned pages be evicted again.

    Exit 1 if none of them was pinned, 3 if a member of a cluster does not answer.

    \b
    Example:
      kvstore unpin -n 3fa2 9c0d41
    """
    away: Away = {}
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        done = client.unpin(space, hashes, away=away)
        alone = client.view() is None
    if run.as_json:
        pages = _verdicts(hashes, done, "unpinned")
        found = {"namespace": space.digest.hex(), "unpinned": sum(done), "pages": pages}
        emit({**found, **away_json(None if alone else away)})
    else:
        print(f"unpinned {sum(done)} of {len(done)} pages")
    return report_failures(away) or (ExitCode.OK if any(done) else ExitCode.MISS)


def _verdicts(hashes: list[bytes], done: list[bool], name: str) -> list[dict[str, Any]]:
    return [{"prefix_hash": h.hex(), name: ok} for h, ok in zip(hashes, done, strict=True)]
