"""Commands for a node's disk tier: flush, scrub, recover."""

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, human_nbytes, progress

PATIENT_S = 120.0  # unless --timeout says otherwise: a full RAM tier may have to be written, a keeper to be waited for
SCRUB_STEP_NBYTES = 64 << 20  # read by the node in one request


def flush(run: Invocation) -> int:
    """Write all pages to disk. Returns when they survive power loss; exit 4 if the disk is full, fails or hangs.

    \b
    Examples:
      kvstore flush
      kvstore flush --timeout 600 --json
    """
    with run.client() as client:
        pages = client.flush(timeout_s=run.timeout_s or PATIENT_S)
    if run.as_json:
        emit({"pages_on_disk": pages})
    else:
        print(f"{pages:,} pages are on disk")
    return ExitCode.OK


def scrub(run: Invocation) -> int:
    """Verify every page on disk now. Exit 5 if one was damaged.

    Damaged pages are dropped, never returned. A node also does this by itself, slowly, all the time.

    \b
    Examples:
      kvstore scrub
      kvstore scrub --json
    """
    intact = damaged = nbytes = 0
    cursor = b""
    with run.client(direct=True) as client:
        total = client.node_status().disk.used_nbytes
        with progress("verifying", total) as report:
            while True:
                reply = client.scrub(cursor, SCRUB_STEP_NBYTES, timeout_s=run.timeout_s or PATIENT_S)
                intact, damaged, nbytes = intact + reply.intact, damaged + reply.damaged, nbytes + reply.nbytes
                cursor = reply.next_cursor
                report(min(nbytes, total))
                if not cursor:
                    break
    if run.as_json:
        emit({"intact": intact, "damaged": damaged, "nbytes": nbytes})
    else:
        print(f"{intact:,} pages intact, {damaged:,} damaged and dropped; {human_nbytes(nbytes)} read")
    return ExitCode.CORRUPT if damaged else ExitCode.OK


def recover(run: Invocation) -> int:
    """Use a disk again that failed, once its cause is gone.

    A node stops using a disk that fails or is full; `kvstore status` says why. This tries the disk and,
    if it works, goes on with what is there. Exit 4 if it still fails.

    \b
    Example:
      kvstore recover
    """
    with run.client(direct=True) as client:
        client.recover(timeout_s=run.timeout_s or PATIENT_S)
    if run.as_json:
        emit({"recovered": True})
    else:
        print("the disk tier is in use again; kvstore flush puts on it what came while it was stopped")
    return ExitCode.OK
