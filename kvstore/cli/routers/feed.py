"""Run `kvstore feed`: which blocks are stored, as they come and go."""

import time
from typing import Annotated

import typer

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, note, printable
from kvstore.errors import Unavailable
from kvstore.keys import short
from kvstore.messages import plain
from kvstore.results import FeedEvent

SHOWN = 4  # keys of a line for people


def feed(
    run: Invocation,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Only namespaces of this model.")
    ] = "",
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="End when all stored blocks were shown.")
    ] = False,
) -> int:
    """Show the stored blocks, then each change, until Ctrl-C.

    A block is stored when the namespaces of all ranks and cache groups of its engine have it. After
    a gap, or a restart of the node, comes a reset, and then everything again. A snapshot may name a
    block twice. In a cluster, all members are followed. Exit 3 with --snapshot if the node does not
    answer.

    \b
    Examples:
      kvstore feed
      kvstore feed --model llama-3-8b --json
      kvstore feed --snapshot --json | jq -s '[.[].prefix_hashes[]] | unique | length'
    """
    said = ""  # why the node is away, told once
    with run.client() as client:
        for event in client.feed(model):
            if event.kind == "away" and snapshot:
                raise Unavailable(event.text)
            if run.as_json or event.kind != "away" or event.text != said:
                _show(run, event)
            said = event.text
            if event.kind == "ready" and snapshot:
                break
    return ExitCode.OK


def _show(run: Invocation, event: FeedEvent) -> None:
    if run.as_json:
        emit(plain(event))
        return
    if event.kind == "idle":
        return
    if event.kind == "away":
        note(f"away: {event.text}")
        return
    at = time.strftime("%H:%M:%S")
    if event.kind in ("reset", "ready"):
        print(f"{at}  {event.kind}", flush=True)
        return
    keys, more = event.prefix_hashes[:SHOWN], len(event.prefix_hashes) - SHOWN
    named = " ".join(map(short, keys)) + (f" and {more:,} more" if more > 0 else "")
    print(f"{at}  {event.kind:<7}  {printable(event.model.model)}  {named}", flush=True)
