"""`kvstore pin` and `kvstore unpin`."""

from typing import Annotated, Any

import typer

from kvstore.cli.everywhere import away_json, without
from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, human_ms
from kvstore.cli.selection import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TokensFileOption,
    TokensOption,
    find_keys,
    find_namespace,
    parse_duration,
)
from kvstore.cluster.spread import Away


def pin(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="How long: 90s, 30m, 1h, 7d.")] = "1h",
) -> int:
    """Keep pages from being evicted for a time. Exit 1 if none of them is stored.

    A new pin replaces the old one. Pinned pages can still be removed.

    \b
    Examples:
      kvstore pin -n 3fa2 9c0d41 --ttl 1h
      kvstore pin --model llama-3-8b --tokens-file system_prompt.txt --ttl 7d
    """
    ttl_s = parse_duration(ttl)
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


def _verdicts(hashes: list[bytes], done: list[bool], name: str) -> list[dict[str, Any]]:
    return [{"prefix_hash": h.hex(), name: ok} for h, ok in zip(hashes, done, strict=True)]


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
    return without(away) or (ExitCode.OK if any(done) else ExitCode.MISS)
