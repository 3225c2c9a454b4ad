"""Run the commands for the disk tier of nodes: flush, scrub, recover, forget."""

from typing import Annotated

import typer

from kvstore.admin import FORGET_TIMEOUT_S
from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import at_each, away_json, report_failures
from kvstore.cli.output import emit, human_nbytes, note, progress
from kvstore.cli.pages import confirm
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.doctor.pages import page_count
from kvstore.results import ScrubResult

SCRUB_STEP_NBYTES = 64 << 20  # bytes that the node reads in one request


def flush(run: Invocation) -> int:
    """Write all pages to disk.

    Returns when they survive power loss; exit 4 if the disk is full, fails or hangs.

    In a cluster all members do so, and each counts the pages that it has; exit 3 if one does not
    answer.

    \b
    Examples:
      kvstore flush
      kvstore flush --timeout 600 --json
    """
    away: Away = {}
    with run.client() as client:
        pages = client.flush(run.patient_s, away)
        alone = client.view() is None
    if run.as_json:
        emit({"pages_on_disk": pages, **away_json(None if alone else away)})
    else:
        print(f"{pages:,} pages are on disk")
    return report_failures(away)


def scrub(run: Invocation) -> int:
    """Verify every page on disk now.

    Exit 5 if one was damaged.

    Damaged pages are dropped, never returned. A node also does this by itself, slowly, all the
    time. In a cluster, members do it one after the other; exit 3 if one does not answer.

    \b
    Examples:
      kvstore scrub
      kvstore scrub --json
    """

    def verify(client: Client, member: str) -> ScrubResult:
        intact = damaged = nbytes = 0
        cursor = b""
        total = client.node_status().disk.used_nbytes
        with progress(f"verifying {member}".rstrip(), total) as report:
            while True:
                reply = client.scrub(cursor, SCRUB_STEP_NBYTES, timeout_s=run.patient_s)
                intact, damaged = intact + reply.intact, damaged + reply.damaged
                nbytes, cursor = nbytes + reply.nbytes, reply.next_cursor
                report(min(nbytes, total))
                if not cursor:
                    return ScrubResult(intact, damaged, nbytes)

    done, away = at_each(run, verify)
    intact, damaged, nbytes = (
        sum(getattr(found, name) for found in done.values())
        for name in ("intact", "damaged", "nbytes")
    )
    if run.as_json:
        emit({"intact": intact, "damaged": damaged, "nbytes": nbytes, **away_json(away)})
    else:
        print(
            f"{intact:,} pages intact, {damaged:,} damaged and dropped; {human_nbytes(nbytes)} read"
        )
    code = report_failures(away)
    return ExitCode.CORRUPT if damaged else code


def recover(run: Invocation) -> int:
    """Use a disk again that failed, once its cause is gone.

    A node stops using a disk that fails; `kvstore status` says why. This writes, syncs and reads a
    test file and a row, and then continues with the pages on it. On a full file system it looks
    again for free space. Exit 4 if it still fails. In a cluster, it
    tries each stopped disk; exit 3 if a member does not answer.

    \b
    Example:
      kvstore recover
    """

    def mend(client: Client, member: str) -> bool:
        status = client.node_status()
        # A tenant's status has no tiers: then the node itself refuses
        no_disk = bool(status.ram and not status.disk)
        if member and (no_disk or status.disk.state == "SERVING"):
            return False
        client.recover(timeout_s=run.patient_s)
        return True

    done, away = at_each(run, mend)
    mended = [member for member, tried in done.items() if tried]
    if run.as_json:
        emit({"recovered": True if away is None else mended, **away_json(away)})
    elif mended:
        whose = f"of {', '.join(mended)} " if away is not None else ""
        print(
            f"the disk tier {whose}is in use again; kvstore flush puts on it what came while it "
            "was stopped"
        )
    else:
        print(f"no disk is stopped at the {len(done)} members that answer")
    return report_failures(away)


def forget(
    run: Invocation,
    tenant: Annotated[
        str,
        typer.Option(
            "--tenant", metavar="NAME", help="Tenant whose pages and namespaces are erased."
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> int:
    """Erase all pages of a tenant.

    They are removed and zeroed in RAM, and their keys on disk are destroyed. Without encryption,
    bytes of its pages may stay on the disk's medium until other pages overwrite them. A page that
    the tenant puts meanwhile may stay. Exit 4 if something is left, 3 if a member of a cluster does
    not answer: run it again then.

    \b
    Examples:
      kvstore forget --tenant acme
      kvstore forget --tenant acme --yes --json --timeout 3600
    """
    away: Away = {}
    with run.client() as client:
        spaces, pages = _about(client, tenant)
        if not yes:
            confirm(f"Erase {spaces} namespaces of {tenant} with {pages} pages?")
        with progress(f"erasing {tenant}", 1.0) as report:
            told = client.forget(tenant, run.timeout_s or FORGET_TIMEOUT_S, away)
            report(1.0)
        alone = client.view() is None
    if run.as_json:
        counts = ("namespaces", "pages", "ram_nbytes", "keys_destroyed", "left", "plain_disk")
        found = {name: getattr(told, name) for name in counts}
        emit(
            {"tenant": tenant, **found, "why": list(told.why), **away_json(None if alone else away)}
        )
    else:
        print(
            f"{tenant}: {told.pages:,} pages of {told.namespaces:,} namespaces are gone; "
            f"{human_nbytes(told.ram_nbytes)} of RAM zeroed, {told.keys_destroyed:,} keys "
            f"destroyed; left: {told.left:,}"
        )
    if told.plain_disk:
        note(
            "the disk is not encrypted: bytes of these pages may stay on its medium until other "
            "pages overwrite them"
        )
    for reason in told.why:
        note(f"{reason}; run it again")
    code = report_failures(away, "; its pages of this tenant remain: run it again when it answers")
    return code or (ExitCode.EXHAUSTED if told.left else ExitCode.OK)


def _about(client: Client, tenant: str) -> tuple[int, int]:
    """Return the namespaces and pages of a tenant; a page counts once for each node that has it."""
    infos = [info for namespace, info in client.namespaces() if namespace.tenant == tenant]
    return len(infos), sum(map(page_count, infos))
