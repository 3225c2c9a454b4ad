"""Run the commands that load a node or listen to its load: bench, replay, record."""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kvstore.cli.contexts.store import NONE
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, human_nbytes, note, option_nbytes, progress, show
from kvstore.cli.selection import remove_all
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.config import ClientConfig
from kvstore.errors import InvalidRequest
from kvstore.results import Recorded
from kvstore.security.secrets import tenant_of
from kvstore.tools.bench import BenchOptions, BenchReport, bench
from kvstore.tools.replay import ReplayReport, replay, replay_namespace, throwaway_node
from kvstore.tools.sessions import with_sessions
from kvstore.tools.trace import Recording, TraceRequest, count_requests, read_trace

CAPACITY_PAGES = 10_000
ASK_S = 5.0  # a node keeps recorded requests this long, at 100,000 pages a second
STEP_S = 0.1


def bench_command(
    run: Invocation,
    page_nbytes: Annotated[
        str, typer.Option("--page-nbytes", metavar="SIZE", help="Page size.")
    ] = "1MiB",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Pages in one request.")] = 16,
    threads: Annotated[int, typer.Option("--threads", metavar="N", help="Requests at a time.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long.")] = 5.0,
) -> int:
    """Measure put, lookup and get on a live node.

    Each thread puts, looks up, gets and removes a batch of pages of its own, again and again. Only
    the calls themselves are timed; every byte read is verified. A node that is full evicts
    threads x batch pages for it. Exit 5 if a page differs from what was written, 3 if a member of a
    cluster could not be asked to remove its pages.

    \b
    Examples:
      kvstore bench
      kvstore bench --page-nbytes 256KiB --batch 64 --threads 4 --seconds 10
      kvstore bench --wire grpc --json
    """
    options = BenchOptions(option_nbytes(page_nbytes, "--page-nbytes"), batch, threads, seconds)
    connections = max(ClientConfig().connections_max, threads)
    with (
        run.client("auto", connections_max=connections) as client,
        progress("measuring", seconds) as on_progress,
    ):
        report = bench(client, options, on_progress)
        corrupt = client.stats.corrupt_pages
    if run.as_json:
        emit({**report.as_dict(), "corrupt_pages": corrupt})
    else:
        _show_bench(report)
    return _verdict(report.mismatches, corrupt, report.away)


def _show_bench(report: BenchReport) -> None:
    print(
        f"wire {report.wire}, pages of {human_nbytes(report.page_nbytes)}, batches of "
        f"{report.batch}, {report.threads} threads, {report.seconds:.1f} s; "
        f"{human_nbytes(report.verified_nbytes)} verified, {report.mismatches} pages wrong, "
        f"{report.pages_full} found no space, {report.pages_lost} were evicted"
    )
    rows = []
    for name, op in (("put", report.put), ("lookup", report.lookup), ("get", report.get)):
        figures = [
            f"{op.latency_ms[p]:.3f}" if op.latency_ms else "-" for p in ("p50", "p90", "p99")
        ]
        rows.append((name, op.calls, f"{op.gb_per_s:.2f}" if name != "lookup" else "", *figures))
    show(("CALL", ">COUNT", ">GB/s", ">p50 ms", ">p90 ms", ">p99 ms"), rows)


CapacityOption = Annotated[
    int | None,
    typer.Option(
        "--capacity-pages", metavar="N", help="Size of the throwaway node. [default: 10000]"
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option("--speed", metavar="X", help="X times the trace's own pace. [default: no pauses]"),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Only the first N requests.")
]
HintsOption = Annotated[
    bool, typer.Option("--hints", help="Sessions tell what their clients know; needs --speed.")
]


def replay_command(
    run: Invocation,
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="JSONL file of requests with hash_ids.")
    ],
    capacity_pages: CapacityOption = None,
    page_bytes: Annotated[
        str, typer.Option("--page-bytes", metavar="SIZE", help="Size of each page.")
    ] = "4096",
    speed: SpeedOption = None,
    limit: LimitOption = None,
    hints: HintsOption = False,
) -> int:
    """Replay a trace; show its hit rate.

    Each line of TRACE is a JSON object with timestamp (ms), input_length, output_length and
    hash_ids, one id per page. Each request looks its pages up, loads the leading run, verifies
    every byte and stores the rest; hit rate, throughput and latencies are shown. Without --address,
    KVSTORE_ADDRESS or --context a node of --capacity-pages is started. On a given node the replay
    has a namespace of its own and removes its pages at the end. Exit 5 if a page differs from what
    was stored.

    \b
    Examples:
      kvstore replay conversation_trace.jsonl
      kvstore replay trace.jsonl --capacity-pages 10000 --page-bytes 4096 --json
      kvstore replay trace.jsonl --address node7:7440 --speed 10 --limit 1000
      kvstore replay trace.jsonl --capacity-pages 2000 --speed 100 --hints
    """
    _check_replay(limit, speed, hints)
    page_nbytes = option_nbytes(page_bytes, "--page-bytes")
    count = count_requests(trace, limit)
    named, own = run.names_address, dict[str, str]()
    if not named:
        run = dataclasses.replace(run, named=NONE)
    namespace, away = replay_namespace(page_nbytes, tenant_of(run.config())), Away()
    with contextlib.ExitStack() as stack:
        if not named:
            # Other nodes' TLS settings do not concern a node on this host
            own = dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "tls_name"), "")
            capacity = CAPACITY_PAGES if capacity_pages is None else capacity_pages
            own["address"] = stack.enter_context(throwaway_node(capacity, page_nbytes)).address
        elif capacity_pages is not None:
            note(
                "--capacity-pages is the size of a throwaway node; with an address, that "
                "node is used as it is"
            )
        client = stack.enter_context(run.client("auto", **own))
        on_progress = stack.enter_context(progress("replaying", count))
        if named:
            stack.callback(lambda: away.update(remove_all(client, namespace)))
        report = replay(
            client,
            _requests(trace, limit, hints),
            namespace,
            speed,
            lambda r: on_progress(r.requests),
            hints,
        )
        corrupt = client.stats.corrupt_pages
    if run.as_json:
        emit({**report.as_dict(), "corrupt_pages": corrupt, "away": sorted(away)})
    else:
        _show_replay(report)
    if report.pages_full:
        note(
            f"{report.pages_full} pages found no space: a request needs more pages than the node "
            "can free"
        )
    return _verdict(report.mismatches, corrupt, sorted(away))


def _requests(trace: Path, limit: int | None, hints: bool) -> Iterator[TraceRequest]:
    """Return the requests; with hints, and if the trace names no session, with named ones."""
    requests = read_trace(trace, limit)
    if hints and not any(request.session for request in read_trace(trace, limit)):
        return with_sessions(requests)
    return requests


def _check_replay(limit: int | None, speed: float | None, hints: bool) -> None:
    if limit is not None and limit < 1:
        raise InvalidRequest(f"--limit {limit} must be at least 1")
    if speed is not None and not speed > 0:
        raise InvalidRequest(f"--speed {speed:g} must be above 0")
    if hints and speed is None:
        raise InvalidRequest("--hints needs --speed: what sessions tell has a time to live")


def _show_replay(report: ReplayReport) -> None:
    print(
        f"prefix hit rate {report.prefix_hit_rate:.4f}: {report.pages_hit:,} of "
        f"{report.pages_asked:,} pages in {report.requests:,} requests"
    )
    print(
        f"wire {report.wire}, {report.seconds:.1f} s; {human_nbytes(report.verified_nbytes)} "
        f"verified, {report.mismatches} pages wrong; {report.pages_stored:,} stored, "
        f"{report.pages_full:,} found no space"
        + (f"; {report.hinted_pages:,} hinted" if report.hinted_pages else "")
    )
    rates = {"put": f"{report.put_gb_per_s:.2f}", "get": f"{report.get_gb_per_s:.2f}", "lookup": ""}
    rows = []
    for name, latency in report.latency_ms.items():
        figures = [f"{latency[p]:.3f}" if latency else "-" for p in ("p50", "p90", "p99")]
        rows.append((name, rates[name], *figures))
    show(("CALL", ">GB/s", ">p50 ms", ">p90 ms", ">p99 ms"), rows)


def _verdict(mismatches: int, corrupt: int, away: list[str]) -> int:
    """Report failures of a load and return the exit code.

    `corrupt` counts pages with a wrong checksum, which the client treated as misses; `away` lists
    the members where the test pages could not be removed.
    """
    if away:
        note(
            f"pages may be left, until they age away, at {', '.join(away)}: they could not be "
            "removed there"
        )
    if mismatches or corrupt:
        return ExitCode.CORRUPT
    return ExitCode.UNAVAILABLE if away else ExitCode.OK


def record(
    run: Invocation,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The trace; a new file.")
    ],
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long; at most a day.")
    ] = 600.0,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="End at this size.")
    ] = "1GiB",
) -> int:
    """Record what a node is asked, as a trace.

    For administrators of all tenants. Each line has the pages of one request, numbered in the order
    of their first use. The trace shows which pages are equal and which follow each other; it has no
    content of prompts. Lookups are requests; pages stored or touched without a lookup are marked
    stored. Ctrl-C ends the recording and keeps what there is. In a cluster, give the address of the
    member that an engine talks to.

    \b
    Examples:
      kvstore record --seconds 3600 --output trace.jsonl
      kvstore record -a node7:7440 -o trace.jsonl --max-bytes 100MiB --json
    """
    if not seconds > 0:
        raise InvalidRequest(f"--seconds {seconds:g} must be above 0")
    most = option_nbytes(max_bytes, "--max-bytes")
    try:
        file = output.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise InvalidRequest(f"{output} exists already; name another file") from error
    except OSError as error:
        raise InvalidRequest(f"can not begin {output}: {error.strerror}") from error
    with file:
        recording, code = _record(run, file, output, seconds, most)
    if recording.nbytes >= most:
        note(f"--max-bytes {max_bytes} were reached before the time was over")
    if recording.dropped:
        note(
            f"{recording.dropped:,} requests exceeded the node's memory for recordings and are "
            "missing in the trace"
        )
    if not recording.nbytes:
        raise Failure(
            f"no client asked this node for a page meanwhile; {output} is not written",
            code or ExitCode.MISS,
        )
    _show_recording(run, recording, output)
    return code


def _record(
    run: Invocation, file: TextIO, output: Path, seconds: float, most: int
) -> tuple[Recording, ExitCode]:
    """Record into a new file. Raises Failure if it can not be written, or was removed meanwhile."""
    code = ExitCode.OK
    try:
        with tempfile.TemporaryFile() as spool:
            recording = Recording(spool)
            try:
                with (
                    run.client(direct=True) as client,
                    progress("recording", seconds) as on_progress,
                ):
                    _collect(client, recording, seconds, most, on_progress)
            except KeyboardInterrupt:
                code = ExitCode.INTERRUPTED
            finally:  # a node that is lost takes away nothing of what was written
                file.writelines(recording.lines())
                file.flush()
                removed = not os.fstat(file.fileno()).st_nlink
                if not recording.nbytes:
                    output.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            if not output.stat().st_size:
                output.unlink()  # an empty file would be in the way of the next recording
        raise Failure(
            f"can not write {output}, or beside it: {error.strerror}", ExitCode.UNWRITTEN
        ) from error
    if removed and recording.nbytes:
        raise Failure(f"{output} was removed while it was written", ExitCode.UNWRITTEN)
    return recording, code


def _show_recording(run: Invocation, recording: Recording, output: Path) -> None:
    requests, stored, pages = recording.requests, recording.stores, len(recording.chains)
    if run.as_json:
        found = {"requests": requests, "stored": stored, "pages": pages}
        emit({**found, "dropped": recording.dropped, "output": str(output)})
    else:
        print(f"{requests:,} requests and {stored:,} other uses of {pages:,} pages are in {output}")


def _collect(
    client: Client,
    recording: Recording,
    seconds: float,
    most: int,
    on_progress: Callable[[float], None],
) -> None:
    """Collect a recording until it is over, full or interrupted."""
    name = client.record(seconds).recording
    begin = asked = time.monotonic()
    reply = Recorded()
    try:
        while not reply.over and recording.nbytes < most:
            if not reply.more:
                while (now := time.monotonic()) < min(
                    asked + ASK_S, max(asked, begin + seconds) + STEP_S
                ):
                    on_progress(now - begin)
                    time.sleep(STEP_S)
                asked = now
            reply = client.record(recording=name)
            recording.add(reply)
    finally:
        while not reply.over:
            reply = client.record(recording=name, end=True)
            recording.add(reply)
