"""Run `kvstore query`: who has the leading blocks of a prompt."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, printable
from kvstore.cli.selection import TokensFileOption, TokensOption, read_tokens
from kvstore.errors import InvalidRequest
from kvstore.keys import short
from kvstore.messages import plain
from kvstore.results import QueryResult
from kvstore.tools.prompts import HASHES, Hashing, query_tokens

Hash = Annotated[
    str, typer.Option("--hash", metavar="|".join(HASHES), help="How the engine hashes its blocks.")
]
Seed = Annotated[
    str | None, typer.Option("--hash-seed", metavar="TEXT", help="PYTHONHASHSEED of vLLM.")
]


def query(
    run: Invocation,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="The model's name.")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="HASH", help="Block hashes in hex, head first.")
    ] = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    block_tokens: Annotated[
        int,
        typer.Option(
            "--block-size",
            metavar="TOKENS",
            help="Tokens of a block. [default: those that are stored]",
            show_default=False,
        ),
    ] = 0,
    hash_name: Hash = HASHES[0],
    hash_seed: Seed = None,
) -> int:
    """Show how many leading blocks of a prompt are stored.

    A block counts if all ranks and cache groups of its engine have it. The prompt is given as block
    hashes or as tokens, for each KV of this model's name: engines with other settings have another
    one. Indented lines are nodes that have blocks by themselves, near copies included. Does not
    count as a use of the pages. Exit 1 if not even the first block is stored.

    \b
    Examples:
      kvstore query --model llama-3-8b --tokens-file prompt.txt --block-size 64
      kvstore query --model llama-3-8b --hash vllm-sha256 --block-size 16 --tokens 1,2,3
      kvstore query --model llama-3-8b 9c0d41... 77ab03... --json
    """
    ids = read_tokens(tokens, tokens_file)
    if bool(keys) == (ids is not None):
        raise InvalidRequest("give either block hashes or --tokens/--tokens-file")
    with run.client() as client:
        if ids is None:
            found = client.query(model, [_hash(text) for text in keys or ()])
        else:
            found = query_tokens(client, model, ids, block_tokens, Hashing(hash_name, hash_seed))
    if run.as_json:
        emit({"results": [plain(result) for result in found]})
    else:
        _show(found)
    return ExitCode.OK if any(result.blocks for result in found) else ExitCode.MISS


def _hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequest(f"{printable(text)[:40]!r} is no hash in hex digits") from error


def _show(found: Sequence[QueryResult]) -> None:
    names = defaultdict(list)
    for result in found:
        names[result.model.tenant, result.model.model].append(result)
    for (tenant, model), some in names.items():
        for result in some:
            tokens = result.blocks * result.model.page_tokens
            kv = f"  KV {short(result.model.id)}" if len(some) > 1 else ""
            what = f"{result.blocks:,} blocks, {tokens:,} tokens"
            print(f"{printable(tenant)}  {printable(model)}{kv}  {what}")
            for host in result.hosts:
                where = f"({host.ram:,} in RAM, {host.disk:,} on disk)"
                print(f"  {host.host}  {host.blocks:,} blocks {where}")
    if not found:
        print("not even the first block is stored")
