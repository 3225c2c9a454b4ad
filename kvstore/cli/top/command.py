"""Run `kvstore top`: print samples, or show them live with keys."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from kvstore.cli.invocation import Invocation
from kvstore.cli.output import console, emit
from kvstore.cli.top.boards import CLUSTER_COLUMNS, NODE_COLUMNS, board_of
from kvstore.cli.top.keyboard import Keyboard, keyboard
from kvstore.cli.top.samples import Sample, cluster_samples, node_samples
from kvstore.cli.top.screen import Board, Controls, arranged, draw, sort_column
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable

INTERVAL_S_MIN = 0.05
JOIN_S = 0.2  # how long to wait for a sample that is under way when the user quits
RETRY_S = 1.0
Samples = Callable[[], Iterator[Sample]]


def top(
    run: Invocation,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between samples.")
    ] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-c", metavar="N", help="End after N samples; 0: go on.")
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="Sort by a column, such as hit.")
    ] = "",
    text: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Only rows whose names contain it.")
    ] = "",
) -> None:
    """Watch the node, or the members of a cluster, live.

    Requests, hit rate, throughput, evictions and latencies (p50, p99) per second, and the tokens of
    found pages in RAM, on disk and at other members. In a cluster it shows each member, the sums of
    those that answer, and the shares of found pages. On a terminal, keys sort, filter, pause and
    scroll: ? lists them, q ends it. With --json one object per sample is printed, one per line.

    \b
    Examples:
      kvstore top
      kvstore top --direct -a node7:7440
      kvstore top --sort "get p99" --filter rack1
      kvstore top --once
      kvstore top --json --count 10 | jq .totals.put_nbytes_per_s
    """
    if interval < INTERVAL_S_MIN:
        raise InvalidRequest(f"--interval {interval:g} is below {INTERVAL_S_MIN} s")
    if count < 0:
        raise InvalidRequest(f"--count {count} is negative; 0 goes on until Ctrl-C")
    with run.client() as client:
        alone = client.view() is None
        columns = NODE_COLUMNS if alone else CLUSTER_COLUMNS
        controls = Controls(sort_column(sort, columns), text=text)

        def samples() -> Iterator[Sample]:
            take = node_samples if alone else cluster_samples
            return take(client, interval, 1 if once else count)

        try:
            _watch(samples, controls, run.as_json, once)
        except KeyboardInterrupt:  # the usual way to end a live view
            return


def _watch(samples: Samples, controls: Controls, as_json: bool, once: bool) -> None:
    out = console()
    if as_json:
        for sample in samples():
            emit(_chosen(sample, controls))
    elif once or not out.is_terminal:
        for sample in samples():
            out.print(draw(board_of(sample), controls, out))
    elif sys.stdin is not None and sys.stdin.isatty():
        _Screen(out, controls, samples).run()
    else:  # no keys can be pressed
        with Live(console=out, auto_refresh=False) as live:
            for sample in samples():
                live.update(draw(board_of(sample), controls, out), refresh=True)


def _chosen(sample: Sample, controls: Controls) -> dict[str, Any]:
    """Return the values with the members or namespaces that the filter leaves, in order."""
    if not (controls.sort or controls.text):
        return sample.values
    board = board_of(sample)
    if board.what == "members":
        members = sample.values["members"]
        return {**sample.values, "members": [members[i] for i in arranged(board, controls)]}
    by_digest = {space["digest"][:12]: space for space in sample.values["namespaces"]}
    rows = [board.rows[index] for index in arranged(board, controls)]
    return {**sample.values, "namespaces": [by_digest[row[0].text] for row in rows]}


class _Screen:
    """The live view on a terminal. Samples come from a thread, so that keys act at once."""

    def __init__(self, out: Console, controls: Controls, samples: Samples) -> None:
        self._out = out
        self._controls = controls
        self._samples = samples
        self._board: Board | None = None
        self._newest: Sample | None = None
        self._error: KVStoreError | None = None
        self._ended = False  # all samples were taken
        self._stopped = threading.Event()

    def run(self) -> None:
        """Show samples until the user quits, the samples end, or the node refuses."""
        with keyboard() as keys:
            sampler = threading.Thread(target=self._sample, args=(keys,), name="top", daemon=True)
            sampler.start()
            try:
                with Live(console=self._out, auto_refresh=False, screen=True) as live:
                    self._loop(keys, live)
            finally:
                self._stopped.set()
                sampler.join(JOIN_S)
        if self._board is not None:  # the last sample stays on the terminal
            self._controls.help = False
            self._out.print(draw(self._board, self._controls, self._out))
        if self._error is not None and not self._retried:
            raise self._error

    def _loop(self, keys: Keyboard, live: Live) -> None:
        while True:
            if self._newest is not None and (self._board is None or not self._controls.paused):
                self._board = board_of(self._newest)
            self._controls.note = f"NO ANSWER: {self._error}" if self._error else ""
            live.update(self._drawn(), refresh=True)
            if self._ended:
                return
            try:
                pressed = keys.wait()
            except EOFError:  # the terminal is gone
                return
            columns = self._board.columns if self._board else ()
            if not all(self._controls.press(key, columns) for key in pressed):
                return

    def _drawn(self) -> Group:
        if self._board is None:
            return Group(self._controls.note or "waiting for the first sample; q quits")
        return draw(self._board, self._controls, self._out, keys=True)

    @property
    def _retried(self) -> bool:
        """Return whether the error may pass: the view stays, and samples are tried again."""
        return isinstance(self._error, Unavailable | DeadlineExceeded)

    def _sample(self, keys: Keyboard) -> None:
        while not self._stopped.is_set():
            try:
                for sample in self._samples():
                    if self._stopped.is_set():
                        return
                    self._newest, self._error = sample, None
                    keys.wake()
                self._ended = True
            except KVStoreError as error:
                if self._stopped.is_set():
                    return
                self._error = error
                self._ended = not self._retried
            except Exception:
                if self._stopped.is_set():  # the client was closed during the call
                    return
                self._ended = True
                raise
            keys.wake()
            if self._ended:
                return
            self._stopped.wait(RETRY_S)
