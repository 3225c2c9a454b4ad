"""`kvstore record`: what a node is asked, as a trace to plan from."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, note, progress
from kvstore.cli.sizes import option_nbytes
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.measure.recording import Recording
from kvstore.pb import kvstore_pb2 as pb

ASK_S = 5.0  # a node keeps what comes in so long, at 100,000 pages a second
STEP_S = 0.1


def record(
    run: Invocation,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The trace; a new file.")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long; at most a day.")] = 600.0,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="End when it has come to so much.")
    ] = "1GiB",
) -> int:
    """Record what a node is asked, as a trace.

    For administrators of all tenants. Each line has the pages of one request as numbers in the
    order in which they first came: which pages are the same and follow each other, not which
    prompts they are of. Lookups are requests; what is stored, or touched, without a lookup is
    marked stored. Ctrl-C ends it and keeps what there is. Of a cluster ask the member that an engine
    talks to, with its address.

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
    except OSError as error:
        raise InvalidRequest(f"can not begin {output}: {error.strerror}") from error
    try:
        with file, tempfile.TemporaryFile() as spool:
            recording, code = Recording(spool), ExitCode.OK
            try:
                with run.client(direct=True) as client, progress("recording", seconds) as on_progress:
                    _listen(client, recording, seconds, most, on_progress)
            except KeyboardInterrupt:
                code = ExitCode.INTERRUPTED
            finally:  # a node that is lost takes nothing of what it has told
                file.writelines(recording.lines())
                if not recording.nbytes:
                    output.unlink()
    except OSError as error:
        if not output.stat().st_size:
            output.unlink()  # it would be in the way of the next
        raise Failure(f"can not write {output}, or beside it: {error.strerror}", ExitCode.UNWRITTEN) from error
    if recording.nbytes >= most:
        note(f"--max-bytes {max_bytes} were reached before the time was over")
    if recording.dropped:
        note(f"{recording.dropped:,} requests found no room at the node and are not in the trace")
    if not recording.nbytes:
        raise Failure(
            f"nobody asked this node for a page in {seconds:g} s; {output} is not written", code or ExitCode.MISS
        )
    found = {"requests": recording.requests, "stored": recording.stores, "pages": len(recording.chains)}
    if run.as_json:
        emit({**found, "dropped": recording.dropped, "output": str(output)})
    else:
        print(
            f"{recording.requests:,} requests and {recording.stores:,} other uses of {len(recording.chains):,} pages "
            f"are in {output}"
        )
    return code


def _listen(
    client: Client, recording: Recording, seconds: float, most: int, on_progress: Callable[[float], None]
) -> None:
    """Until it is over, full, or interrupted."""
    name = client.record(seconds).recording
    begin = asked = time.monotonic()
    reply = pb.RecordReply()
    try:
        while not reply.over and recording.nbytes < most:
            if not reply.more:
                while (now := time.monotonic()) < min(asked + ASK_S, max(asked, begin + seconds) + STEP_S):
                    on_progress(now - begin)
                    time.sleep(STEP_S)
                asked = now
            reply = client.record(recording=name)
            recording.add(reply)
    finally:
        while not reply.over:
            reply = client.record(recording=name, end=True)
            recording.add(reply)
