"""Run the commands that move page bytes: get, put."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.decode import PlaneStatistics, decode, layer_slices
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import Report, emit, human_nbytes, progress, show_fitting
from kvstore.cli.selection import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TokensFileOption,
    TokensOption,
    find_keys,
    find_namespace,
    hash_tokens,
    input_name,
    option_seconds,
    read_input,
    read_tokens,
    whole_key,
)
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.keys import PREFIX_HASH_NBYTES_MAX, PREFIX_HASH_NBYTES_MIN, Namespace
from kvstore.layout import ByteRange, opaque_layout
from kvstore.results import ACK_ONE, Keep, PutOutcome
from kvstore.security.secrets import tenant_of

# Bytes of all pages of one put command: they are in memory together.
INPUT_NBYTES_MAX = 4 << 30


def get(
    run: Invocation,
    keys: KeysArgument = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Output file; - or none is stdout."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", help="Only this layer of each page.")
    ] = None,
    decoded: Annotated[
        bool,
        typer.Option("--decode", help="Show planes, shapes and statistics instead of the bytes."),
    ] = False,
) -> None:
    """Read pages.

    Their checksums are verified.

    Several pages follow one another. Exit 1 if one is missing, or if the node finds its own copy
    damaged and drops it, 5 if one arrives with other bytes than were stored. Those of a keyed
    namespace need its key: set KVSTORE_PAGE_KEY_FILE.

    With --json or --decode the bytes themselves go to FILE only.

    \b
    Examples:
      kvstore get -n 3fa2 9c0d41 -o page.bin
      kvstore get -n 3fa2 9c0d41 --layer 0 | xxd | head
      kvstore get 9c0d41 --decode
      kvstore get --model llama-3-8b --tokens-file prompt.txt --decode --layer 31 --json
    """
    to_stdout = output is None or str(output) == "-"
    if not (decoded or run.as_json) and to_stdout and sys.stdout.isatty():
        raise InvalidRequest(
            "will not write page bytes to a terminal; add -o FILE, --decode, or a pipe"
        )
    found: list[dict[str, Any]] = []
    with run.client() as client:
        space, _ = find_namespace(client, namespace, model)
        ranges = space.layout.layer_ranges(layer) if layer is not None else None
        hashes = find_keys(client, space, keys, tokens, tokens_file)
        _need_all(client, space, hashes)
        with _destination(output, to_stdout, decoded or run.as_json) as write:
            for page, planes in _pages(
                _read(client, space, hashes, ranges), space, len(hashes), layer, decoded, write
            ):
                found.append(page)
                if decoded and not run.as_json:
                    _show_planes(page, planes)
    if run.as_json:
        emit(
            {
                "namespace": space.digest.hex(),
                "file": None if to_stdout else str(output),
                "pages": found,
            }
        )


def _pages(
    read: Iterator[tuple[bytes, bytearray]],
    space: Namespace,
    count: int,
    layer: int | None,
    decoded: bool,
    write: Callable[[bytearray], object],
) -> Iterator[tuple[dict[str, Any], list[PlaneStatistics]]]:
    """Write the bytes of pages, and yield what --json prints, and the planes if decoded.

    No bar is on the terminal when a decoded page is yielded, so that it can be printed.
    """
    if not decoded:
        with progress("reading", count) as report:
            for number, (key, data) in enumerate(read, 1):
                write(data)
                report(number)
                yield _page_json(key, data, layer, None), []
        return
    for number, (key, data) in enumerate(read, 1):
        write(data)
        with progress(f"decoding {number} of {count}", 1.0) as report:
            planes = _decode(space, data, layer, report)
        yield _page_json(key, data, layer, planes), planes


def _need_all(client: Client, space: Namespace, hashes: list[bytes]) -> None:
    """Raise Failure unless all pages are there, before any output is made."""
    # By stat, not lookup: an operator's command must not count as an engine's hit or miss.
    present = [page.present for page in client.stat(space, hashes)]
    if not all(present):
        missing = hashes[present.index(False)].hex()
        raise Failure(
            f"{present.count(False)} of {len(hashes)} pages are not stored in namespace "
            f"{space.digest.hex()[:12]}, the first is {missing}; list what is there with: kvstore "
            f"ls -n {space.digest.hex()[:12]}"
        )


@contextmanager
def _destination(
    output: Path | None, to_stdout: bool, shown: bool
) -> Iterator[Callable[[bytearray], object]]:
    """Yield a function that writes a page's bytes to the destination."""
    if to_stdout:
        yield (lambda data: None) if shown else sys.stdout.buffer.write
        return
    assert output is not None
    try:
        # Unbuffered, so that no write is left for the interpreter's end, where errors can not be
        # reported
        file = output.open("wb", buffering=0)
    except OSError as error:
        raise InvalidRequest(f"can not write {output}: {error.strerror}") from error

    def write(data: bytearray) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Failure(
                f"can not write {output}: {error.strerror}", ExitCode.UNWRITTEN
            ) from error

    with file:
        yield write


def _read(
    client: Client, space: Namespace, hashes: list[bytes], ranges: tuple[ByteRange, ...] | None
) -> Iterator[tuple[bytes, bytearray]]:
    """Read one page at a time, so that memory use is one page.

    The buffer is reused for the next page.
    """
    whole = ranges is None
    data = bytearray(
        space.layout.page_nbytes if ranges is None else sum(part.nbytes for part in ranges)
    )
    for prefix_hash in hashes:
        if whole:
            hit = client.get(space, [prefix_hash], [data])[0]
        else:
            hit = client.get_ranges(space, [prefix_hash], ranges or (), [data])[0]
        if not hit:
            stats = client.stats
            reason, code = "was evicted, removed, or found damaged meanwhile", ExitCode.MISS
            if stats.corrupt_pages:
                reason, code = "does not match its checksum", ExitCode.CORRUPT
            elif stats.forged_pages:
                reason, code = "was made or changed without its key", ExitCode.CORRUPT
            raise Failure(f"page {prefix_hash.hex()} {reason}; the output ends before it", code)
        yield prefix_hash, data


def _decode(
    space: Namespace, data: bytearray, layer: int | None, report: Report
) -> list[PlaneStatistics]:
    """Decode a page; `report` gets the part that is done, up to 1."""
    pieces, planes = layer_slices(space.layout, layer), []
    for plane in decode(pieces, memoryview(data)):
        planes.append(plane)
        report(len(planes) / len(pieces))
    return planes


def _page_json(
    prefix_hash: bytes, data: bytearray, layer: int | None, planes: list[PlaneStatistics] | None
) -> dict[str, Any]:
    page: dict[str, Any] = {"prefix_hash": prefix_hash.hex(), "nbytes": len(data), "layer": layer}
    return page if planes is None else {**page, "planes": [plane.as_dict() for plane in planes]}


def _show_planes(page: dict[str, Any], planes: list[PlaneStatistics]) -> None:
    print(f"page {page['prefix_hash']}: {human_nbytes(page['nbytes'])}, {len(planes)} planes")
    columns = (
        "GROUP",
        ">LAYER",
        "PLANE",
        "DTYPE",
        "SHAPE",
        ">OFFSET",
        ">MIN",
        ">MAX",
        ">MEAN",
        ">STD",
        ">ZEROS",
    )
    rows = []
    for plane in planes:
        s = plane.statistics
        shape = "x".join(str(n) for n in plane.shape)
        figures = [
            f"{value:.4g}" if value is not None else "-" for value in (s.min, s.max, s.mean, s.std)
        ]
        row = (
            plane.group,
            plane.layer,
            plane.plane,
            plane.dtype,
            shape,
            plane.offset,
            *figures,
            s.zero_count,
        )
        rows.append((*row, s.nan_count, s.inf_count))
    show_fitting((*columns, ">NAN", ">INF"), rows)


CreateOption = Annotated[
    str | None,
    typer.Option(
        "--create-opaque", metavar="MODEL", help="Make a namespace for pages of this file's size."
    ),
]
AckOption = Annotated[
    str,
    typer.Option(
        "--ack", metavar="one|all", help="Return when one, or all, of a page's owners have it."
    ),
]


def put(
    run: Invocation,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Page bytes; - is stdin.")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Prefix hash of each page, hex.")
    ] = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    create_opaque: CreateOption = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="Forget new pages after: 90s, 30m, 1h, 7d."),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Return when they survive power loss.")
    ] = False,
    ack: AckOption = ACK_ONE,
) -> int:
    """Store pages from a file.

    One page per KEY, or per full page of tokens; the file must have exactly their bytes. Pages that
    exist are left alone. Exit 4 if the node has no space for one of them.

    \b
    Examples:
      kvstore put page.bin -n 3fa2 9c0d4177ab02e1f09c0d4177ab02e1f0
      kvstore put pages.bin --model llama-3-8b --tokens-file prompt.txt
      kvstore put page.bin -n 3fa2 --tokens-file prompt.txt --durable --ttl 7d
      kvstore put page.bin -n 3fa2 --tokens-file prompt.txt --ack all
      head -c 65536 /dev/urandom | kvstore put - --create-opaque blob --tokens 1,2,3
    """
    if str(file) == "-" and str(tokens_file) == "-":
        raise InvalidRequest("FILE and --tokens-file can not both be stdin")
    if create_opaque is not None and (namespace is not None or model is not None):
        raise InvalidRequest(
            "--create-opaque names the namespace; leave out --namespace and --model"
        )
    keep = Keep(option_seconds(ttl) if ttl is not None else 0.0, durable, ack)
    ids = read_tokens(tokens, tokens_file)
    if bool(keys) == (ids is not None):
        raise InvalidRequest("name pages either by KEY or by --tokens/--tokens-file")
    data = read_input(file, INPUT_NBYTES_MAX)
    if not data:
        raise InvalidRequest(f"{input_name(file)} is empty")
    with run.client() as client:
        if create_opaque is not None:
            space = _opaque_space(client, create_opaque, (file, data), len(keys or "1"), ids)
        else:
            space, _ = find_namespace(client, namespace, model)
        hashes = (
            [_whole(key) for key in keys or ()]
            if ids is None
            else hash_tokens(ids, space.layout.page_tokens)
        )
        outcomes = _store(client, space, hashes, (file, data), keep)
    _show_outcomes(run, space, hashes, outcomes)
    if PutOutcome.AWAY in outcomes:
        return ExitCode.UNAVAILABLE
    return ExitCode.EXHAUSTED if PutOutcome.FULL in outcomes else ExitCode.OK


def _opaque_space(
    client: Client, model: str, content: tuple[Path, bytes], count: int, ids: list[int] | None
) -> Namespace:
    """Return a namespace for `count` equal pages of the file."""
    file, data = content
    if len(data) % count:
        raise InvalidRequest(
            f"{input_name(file)} has {len(data)} bytes, which {count} keys can not share evenly"
        )
    layout = opaque_layout(len(data) // count, len(ids) if ids else 1)
    return Namespace(model, layout, tenant_of(client.config), key_id=client.key_id)


def _show_outcomes(
    run: Invocation, space: Namespace, hashes: list[bytes], outcomes: list[PutOutcome]
) -> None:
    counts = {outcome.name.lower(): outcomes.count(outcome) for outcome in PutOutcome}
    if run.as_json:
        pages = [
            {"prefix_hash": h.hex(), "outcome": o.name.lower()}
            for h, o in zip(hashes, outcomes, strict=True)
        ]
        emit(
            {
                "namespace": space.digest.hex(),
                "page_nbytes": space.layout.page_nbytes,
                **counts,
                "pages": pages,
            }
        )
    else:
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        print(
            f"{len(hashes)} pages of {human_nbytes(space.layout.page_nbytes)} in "
            f"{space.digest.hex()}: {said}"
        )
        for prefix_hash, outcome in zip(hashes, outcomes, strict=True):
            print(f"{prefix_hash.hex()} {outcome.name.lower()}")


def _whole(text: str) -> bytes:
    try:
        key = whole_key(text)
    except ValueError:
        key = None
    if key is None:
        low, high = 2 * PREFIX_HASH_NBYTES_MIN, 2 * PREFIX_HASH_NBYTES_MAX
        raise InvalidRequest(
            f"key {text[:40]!r} is not a whole prefix hash of {low} to {high} hex digits"
        )
    return key


def _store(
    client: Client, space: Namespace, hashes: list[bytes], source: tuple[Path, bytes], keep: Keep
) -> list[PutOutcome]:
    (file, data), nbytes = source, space.layout.page_nbytes
    if len(data) != len(hashes) * nbytes:
        raise InvalidRequest(
            f"{input_name(file)} has {len(data)} bytes; {len(hashes)} pages of {nbytes} need "
            f"{len(hashes) * nbytes}"
        )
    view = memoryview(data)
    return client.put(
        space, hashes, [view[start : start + nbytes] for start in range(0, len(data), nbytes)], keep
    )
