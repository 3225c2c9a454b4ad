"""Commands on pages that do not move their bytes: stat, lookup, rm, verify."""

import sys
from typing import Annotated

import typer

from kvstore.cli.batches import all_keys, pieces
from kvstore.cli.everywhere import away_json, without
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.listing import show_pages
from kvstore.cli.output import emit, plain, progress
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
from kvstore.cluster.spread import Away
from kvstore.doctor.hints import page_count
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb

# Page bytes that the node is asked to hash in one request: a tenth of a second, far below any deadline.
VERIFY_NBYTES = 1 << 30

AllOption = Annotated[bool, typer.Option("--all", help="All pages of the namespace, which must be named.")]


def stat(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
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
        emit([plain(page) for page in pages])
    else:
        show_pages(pages)
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
        pages = [{"prefix_hash": h.hex(), "present": present} for h, present in zip(hashes, found.present, strict=True)]
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
    every: AllOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Remove pages, pinned ones too. Exit 1 if none of them was stored, 3 if a member of a cluster does not answer.

    \b
    Examples:
      kvstore rm -n 3fa2 9c0d41 77ab02
      kvstore rm --model llama-3-8b --all --yes
    """
    away: Away = {}
    with run.client() as client:
        space, info = _named_namespace(client, keys, namespace, model, every)
        if every and not yes:
            confirm(f"Remove all {_about(client, info)} pages of {space.model} [{space.digest.hex()[:12]}]?")
        chosen = all_keys(client, space) if every else find_keys(client, space, keys, None, None)
        removed = asked = 0
        with progress("removing", _about(client, info) if every else len(keys or ())) as report:
            for piece in pieces(chosen):
                removed += sum(client.remove(space, piece, away=away))
                asked += len(piece)
                report(asked)
        alone = client.view() is None
    if run.as_json:
        counts = {"removed": removed, "absent": asked - removed}
        emit({"namespace": space.digest.hex(), **counts, **away_json(None if alone else away)})
    else:
        print(f"removed {removed} of {asked} pages")
    code = without(away, "; what it has of these pages may come back: remove them again when it answers")
    return code or (ExitCode.OK if removed else ExitCode.MISS)


def _about(client: Client, info: pb.NamespaceInfo) -> int:
    """How many pages a namespace has, where each lies at as many members as there are replicas."""
    view = client.view()
    return page_count(info) // min(view.replicas, len(view.members)) if view else page_count(info)


def _named_namespace(
    client: Client, keys: list[str] | None, namespace: str | None, model: str | None, every: bool
) -> tuple[Namespace, pb.NamespaceInfo]:
    """For commands that take --all, which must not guess the namespace."""
    if every and keys:
        raise InvalidRequest("give keys or --all, not both")
    if every and namespace is None and model is None:
        raise InvalidRequest("--all needs the namespace: add --namespace or --model")
    return find_namespace(client, namespace, model)


def confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(f"{question} Nobody is there to ask; add --yes")
    if not typer.confirm(question, err=True):
        raise Failure("nothing was removed", ExitCode.USAGE)


def verify(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    every: AllOption = False,
) -> int:
    """Let the node check pages for damage.

    It compares them with their checksums and drops those that do not match.

    Exit 5 if a page was corrupt, 3 if a member of a cluster does not answer, 1 if none of the pages is stored.

    \b
    Examples:
      kvstore verify -n 3fa2 9c0d41
      kvstore verify --model llama-3-8b --all
    """
    total, away = pb.VerifyReply(), Away()
    with run.client() as client:
        space, info = _named_namespace(client, keys, namespace, model, every)
        count_max = max(1, VERIFY_NBYTES // info.page_nbytes)
        chosen = all_keys(client, space) if every else find_keys(client, space, keys, None, None)
        with progress("verifying", _about(client, info) if every else len(keys or ())) as report:
            for piece in pieces(chosen, count_max):
                reply = client.verify(space, piece, away=away)
                total.intact += reply.intact
                total.dropped += reply.dropped
                total.absent += reply.absent
                report(total.intact + total.dropped + total.absent)
        alone = client.view() is None
    if run.as_json:
        emit({"namespace": space.digest.hex(), **plain(total), **away_json(None if alone else away)})
    else:
        print(f"{total.intact} pages intact, {total.dropped} corrupt and dropped, {total.absent} not stored")
    code = without(away)
    if total.dropped:
        return ExitCode.CORRUPT
    return code or (ExitCode.OK if total.intact else ExitCode.MISS)
