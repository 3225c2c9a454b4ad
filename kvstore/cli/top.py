"""`kvstore top`: what a node is doing, from the differences of its counters; or the members of a cluster."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvstore.cli.cluster_top import cluster_samples
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import console, emit, human_nbytes, percent, table
from kvstore.cli.rates import RATES, Sample, rates
from kvstore.cli.told import pages_told, told_all
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb

INTERVAL_S_MIN = 0.05


def top(
    run: Invocation,
    interval: Annotated[float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between samples.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-c", metavar="N", help="End after N samples; 0: go on.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
) -> None:
    """Watch the node, or the members of a cluster, live.

    Requests, hit rate, throughput and evictions per second; of a cluster each member and the sums of those that
    answer. Ctrl-C ends it. With --json one object per sample is printed, one per line.

    \b
    Examples:
      kvstore top
      KVSTORE_DIRECT=1 kvstore top -a node7:7440      one member of a cluster alone
      kvstore top --interval 5
      kvstore top --once
      kvstore top --json --count 10 | jq .totals.put_nbytes_per_s
    """
    if interval < INTERVAL_S_MIN:
        raise InvalidRequest(f"--interval {interval:g} is below {INTERVAL_S_MIN} s")
    if count < 0:
        raise InvalidRequest(f"--count {count} is negative; 0 goes on until Ctrl-C")
    with run.client() as client:
        samples = _samples if client.view() is None else cluster_samples
        try:
            _watch(samples(client, interval, 1 if once else count), run.as_json)
        except KeyboardInterrupt:  # how a live view is meant to end
            return


def _watch(samples: Iterator[Sample], as_json: bool) -> None:
    out = console()
    if as_json:
        for sample in samples:
            emit(sample.values)
    elif out.is_terminal:
        with Live(console=out, auto_refresh=False) as live:
            for sample in samples:
                live.update(sample.view(out), refresh=True)
    else:
        for sample in samples:
            out.print(sample.view(out))


def _samples(client: Client, interval_s: float, count: int) -> Iterator[Sample]:
    """`count` samples (0: without end), each over one interval."""
    before, before_s = client.node_status(), time.monotonic()
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        now, now_s = client.node_status(), time.monotonic()
        values = sample(before, now, now_s - before_s)
        yield Sample(values, partial(_view, values, client.config.address))
        before, before_s = now, now_s
        taken += 1


def sample(before: pb.NodeStatusReply, now: pb.NodeStatusReply, seconds: float) -> dict[str, Any]:
    """Rates between two states of a node. After a restart its counters began at zero again."""
    restarted, whole = before.instance_id != now.instance_id, told_all(now)
    base = {} if restarted else {info.digest: info.counters for info in before.namespaces}
    zero = pb.Counters()
    namespaces = [
        {
            "digest": info.digest.hex(),
            "model": info.namespace.model,
            "page_count": info.page_count,
            **rates(base.get(info.digest, zero), info.counters, seconds),
        }
        for info in now.namespaces
    ]
    return {
        "seconds": round(seconds, 3),
        "restarted": restarted,
        "state": now.state,
        "uptime_ms": now.uptime_ms,
        "session_count": now.session_count if whole else None,
        "rss_nbytes": now.rss_nbytes if whole else None,
        "ram_used_nbytes": now.ram.used_nbytes if whole else None,
        "ram_capacity_nbytes": now.ram.capacity_nbytes if whole else None,
        "page_count": pages_told(now),
        "totals": rates(zero if restarted else before.totals, now.totals, seconds),
        "namespaces": namespaces,
    }


def _view(values: dict[str, Any], address: str, out: Console) -> Group:
    head = f"{address}  {values['state']}  "
    if values["ram_capacity_nbytes"] is not None:
        ram = f"RAM {human_nbytes(values['ram_used_nbytes'])} of {human_nbytes(values['ram_capacity_nbytes'])}"
        head += f"{ram} ({percent(values['ram_used_nbytes'], values['ram_capacity_nbytes'])})  "
    head += f"pages {values['page_count']:,}"
    if values["session_count"] is not None:
        head += f"  sessions {values['session_count']}"
    columns = ("NAMESPACE", "MODEL", ">PAGES", ">ASKED/s", ">HIT", ">PUT/s", ">GOT/s", ">EVICTED/s", ">PUT", ">GOT")
    rows = [
        _row(space["digest"][:12], space["model"], space["page_count"], space)
        for space in values["namespaces"]
        if space["page_count"] or any(space[rate] for rate in RATES)  # what is left of old benchmarks is no news
    ]
    rows.append(_row("all", "", values["page_count"], values["totals"]))
    return Group(Text(head + "\n"), table(columns, rows))


def _row(digest: str, model: str, pages: int, rates: dict[str, float]) -> tuple[Any, ...]:
    return (
        digest,
        model,
        pages,
        f"{rates['asked_per_s']:,.0f}",
        percent(rates["prefix_hits_per_s"], rates["asked_per_s"]),
        f"{rates['put_per_s']:,.0f}",
        f"{rates['got_per_s']:,.0f}",
        f"{rates['evicted_per_s']:,.0f}",
        human_nbytes(rates["put_nbytes_per_s"]) + "/s",
        human_nbytes(rates["got_nbytes_per_s"]) + "/s",
    )
