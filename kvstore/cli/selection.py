"""Find the namespace and the pages that a command is about, from the user's options.

Shell completion asks the node, and is silent and quick if it does not answer.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.config import named_context
from kvstore.doctor.pages import page_count
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import PREFIX_HASH_NBYTES_MAX, PREFIX_HASH_NBYTES_MIN, Namespace, prefix_hashes
from kvstore.units import DURATION_FORMS, parse_duration

if TYPE_CHECKING:
    from kvstore.results.replies import NamespaceInfo, PageStat

TIMEOUT_S = 0.5  # a shell that waits for TAB must not hang
# keys of one request: few enough for its deadline, and for progress between two requests
COUNT_MAX = 4096
SHA256_DIGITS = 64
TOKENS_NBYTES_MAX = 64 << 20
READ_NBYTES = 4 << 20  # of a file, at a time


def complete_namespace(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete namespace digests for the shell."""
    digests = [(namespace.digest.hex(), namespace.model) for namespace in _namespaces(ctx)]
    return [entry for entry in digests if entry[0].startswith(incomplete.lower())]


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete model names that need no quoting: other users choose them."""
    models = {namespace.model for namespace in _namespaces(ctx)}
    return sorted(
        model for model in models if model.startswith(incomplete) and shlex.quote(model) == model
    )


def _namespaces(ctx: typer.Context) -> list[Namespace]:
    # Callbacks do not run during completion, so options are taken from the words typed so far.
    words = {**ctx.find_root().params, **{k: v for k, v in ctx.params.items() if v is not None}}
    typed = {name: value for name, value in words.items() if value is not None}
    try:
        run = Invocation(named=named_context()).merged({**typed, "timeout_s": TIMEOUT_S})
        with run.client() as client:
            return [namespace for namespace, _ in client.namespaces()]
    except KVStoreError:
        return []


NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="DIGEST",
        help="Namespace by digest or its start.",
        autocompletion=complete_namespace,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Namespace by model, if only one has it.",
        autocompletion=complete_model,
    ),
]
KeysArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY", help="Prefix hashes in hex, or unique starts of them."),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens", metavar="IDS", help="Token ids from the start of the prompt: '1,2,3'."
    ),
]
TokensFileOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens-file",
        metavar="FILE",
        help="Token ids, by commas or spaces, or a JSON list; - is stdin.",
    ),
]


def find_namespace(
    client: Client, digest: str | None, model: str | None
) -> "tuple[Namespace, NamespaceInfo]":
    """Find the one matching namespace; without digest and model, the only one with pages."""
    known = client.namespaces()
    matches = known
    if digest is not None:
        check_hex(digest, "namespace digest")
        matches = [entry for entry in matches if entry[0].digest.hex().startswith(digest.lower())]
    if model is not None:
        matches = [entry for entry in matches if entry[0].model == model]
    if digest is None and model is None:
        matches = [entry for entry in matches if page_count(entry[1])] or matches
    if len(matches) == 1:
        return matches[0]
    said = " and ".join(
        text
        for text in (digest and f"digest {digest}", model is not None and f"model {model!r}")
        if text
    )
    if not matches:
        if not known and not said:
            raise Failure("the node has no namespace yet: store a page first")
        wanted = f"no namespace with {said}" if said else "no namespace has pages"
        raise Failure(f"{wanted}; kvstore ls lists the {len(known)} of the node")
    listed = ", ".join(entry[0].digest.hex()[:12] for entry in matches[:4]) + (
        ", ..." if len(matches) > 4 else ""
    )
    raise Failure(
        f"{len(matches)} namespaces fit{' ' + said if said else ''} ({listed}); name one with "
        "--namespace DIGEST",
        ExitCode.USAGE,
    )


def find_keys(
    client: Client,
    namespace: Namespace,
    keys: Sequence[str] | None,
    tokens: str | None,
    tokens_file: Path | None,
) -> list[bytes]:
    """Return the prefix hashes that the options name, in order. Raises Failure for unknown ones."""
    ids = read_tokens(tokens, tokens_file)
    if bool(keys) == (ids is not None):
        raise InvalidRequest("name pages either by KEY or by --tokens/--tokens-file")
    if ids is not None:
        return hash_tokens(ids, namespace.layout.page_tokens)
    return [_find_key(client, namespace, key) for key in keys or ()]


def _find_key(client: Client, namespace: Namespace, text: str) -> bytes:
    check_hex(text, "key")
    text = text.lower()
    if len(text) == SHA256_DIGITS:
        return bytes.fromhex(text)
    matches = [page.prefix_hash for page in islice(list_pages(client, namespace, text), 2)]
    if len(matches) == 1:
        return matches[0]
    whole = whole_key(text)
    if whole is not None:  # a page that may be missing, or whose hash is the start of another one
        return whole
    if matches:
        raise InvalidRequest(
            f"several keys start with {text}, among them {matches[0].hex()} and {matches[1].hex()}"
        )
    raise Failure(
        f"no page of namespace {namespace.digest.hex()} has a key that starts with {text}"
    )


def list_pages(client: Client, namespace: Namespace, hex_prefix: str) -> "Iterator[PageStat]":
    """List the pages whose hash starts with these hex digits, even or odd in number."""
    start = bytes.fromhex(hex_prefix[: len(hex_prefix) // 2 * 2])
    pages = client.list_pages(namespace, start)
    return (page for page in pages if page.prefix_hash.hex().startswith(hex_prefix))


def pieces(keys: Iterable[bytes], count_max: int = COUNT_MAX) -> Iterator[list[bytes]]:
    """Yield lists of at most `count_max` keys, in order."""
    rest = iter(keys)
    while piece := list(islice(rest, count_max)):
        yield piece


def all_keys(client: Client, namespace: Namespace) -> Iterator[bytes]:
    """Yield the keys of all pages of a namespace.

    Pages may be removed meanwhile: the listing continues behind the last key that it gave.
    """
    return (page.prefix_hash for page in client.list_pages(namespace))


def remove_all(client: Client, namespace: Namespace) -> Away:
    """Remove every page of a namespace; return the members that could not be reached."""
    away: Away = {}
    for piece in pieces(all_keys(client, namespace)):
        client.remove(namespace, piece, away=away)
    return away


def whole_key(text: str) -> bytes | None:
    """Parse a whole key; None if these hex digits are too few or too many."""
    digits = len(text)
    possible = digits % 2 == 0 and PREFIX_HASH_NBYTES_MIN <= digits // 2 <= PREFIX_HASH_NBYTES_MAX
    return bytes.fromhex(text) if possible else None


def check_hex(text: str, what: str) -> None:
    """Raise InvalidRequest unless the text is hexadecimal and not too long."""
    if not re.fullmatch(r"[0-9a-fA-F]+", text):
        raise InvalidRequest(f"{what} {text!r} is not hexadecimal")
    if len(text) > 2 * PREFIX_HASH_NBYTES_MAX:
        raise InvalidRequest(
            f"{what} has {len(text)} hex digits, at most {2 * PREFIX_HASH_NBYTES_MAX}"
        )


def read_tokens(tokens: str | None, tokens_file: Path | None) -> list[int] | None:
    """Return token ids from the command line or a file; None if neither was given."""
    if tokens is not None and tokens_file is not None:
        raise InvalidRequest("give --tokens or --tokens-file, not both")
    if tokens is None and tokens_file is None:
        return None
    text, source = tokens or "", "--tokens"
    if tokens_file is not None:
        data = read_input(tokens_file, TOKENS_NBYTES_MAX)
        text, source = data.decode("utf-8", "replace"), input_name(tokens_file)
    ids = parse_tokens(text, source)
    if not ids:
        raise InvalidRequest(f"{source} has no token ids; write for example 1,2,3")
    return ids


def parse_tokens(text: str, source: str) -> list[int]:
    """Parse '1, 2 3' or '[1, 2, 3]'. Raises InvalidRequest naming the source and the bad word."""
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{source} is not a JSON list: {error}") from error
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise InvalidRequest(f"{source}: a token id is not an integer")
        return list(ids)
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise InvalidRequest(
                f"{source}: {word[:40]!r} is not a token id; write for example 1,2,3"
            )
    return [int(word) for word in words]


def hash_tokens(ids: list[int], page_tokens: int) -> list[bytes]:
    """Return the prefix hashes of tokens. Raises InvalidRequest if they fill no page."""
    hashes = prefix_hashes(ids, page_tokens)
    if not hashes:
        raise InvalidRequest(
            f"{len(ids)} tokens fill no page; a page of this namespace has {page_tokens}"
        )
    return hashes


def read_input(path: Path, nbytes_max: int) -> bytes:
    """Read a file, or stdin for `-`. Raises InvalidRequest if it is unreadable or too long."""
    try:
        if str(path) == "-":
            return _read_all(sys.stdin.buffer, path, nbytes_max)
        with path.open("rb") as file:
            return _read_all(file, path, nbytes_max)
    except OSError as error:
        raise InvalidRequest(f"can not read {path}: {error.strerror}") from error
    except MemoryError as error:
        raise Failure(
            f"{path} does not fit into this process's memory", ExitCode.EXHAUSTED
        ) from error


def input_name(path: Path) -> str:
    """Return the name of an input file for messages; `-` is stdin."""
    return "stdin" if str(path) == "-" else str(path)


def _read_all(file: BinaryIO, path: Path, nbytes_max: int) -> bytes:
    """Read to the end in pieces: one large read would reserve `nbytes_max` for a small file."""
    pieces, nbytes = [], 0
    while piece := file.read(READ_NBYTES):
        pieces.append(piece)
        nbytes += len(piece)
        if nbytes > nbytes_max:
            raise InvalidRequest(f"{input_name(path)} has more than {nbytes_max} bytes")
    return b"".join(pieces)


def option_seconds(text: str) -> float:
    """Parse a duration option above 0. Raises InvalidRequest."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    if seconds <= 0:
        raise InvalidRequest(f"{text!r} must be above 0; write for example {DURATION_FORMS}")
    return seconds
