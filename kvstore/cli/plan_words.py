"""What a plan comes to, in sentences."""

from collections.abc import Iterator, Sequence

from kvstore.cli.output import human_nbytes
from kvstore.plan.plan import NEARLY_ALL, Plan, Row

LITTLE = 0.01  # of the hit rate: what twice the size must add at least
NEAR_BOUND = 0.95


def recommendation(plan: Plan) -> list[str]:
    if not plan.endless:
        return ["No page is asked for a second time: no store would save anything on this trace."]
    return [*_of_size(plan), _of_ram(plan), *_of_disk(plan), _of_policy(plan.rows), *_of_copies(plan)]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * max(0.0, share):.1f} points"


def _of_size(plan: Plan) -> Iterator[str]:
    knee, wanted = human_nbytes(plan.nearly_all_nbytes), human_nbytes(plan.wanted_nbytes)
    yield (
        f"A store that never forgets would hit {percent(plan.endless)} of the pages; the rest is asked for once. "
        f"The knee is at {knee}, {plan.nearly_all_pages:,} pages: {percent(NEARLY_ALL * plan.endless)}. "
        f"Beyond {wanted} nothing is gained."
    )
    ram, worst = plan.ram_beside_disk_nbytes, f"more than {plan.disk_gb_per_s:g} GB/s in the worst {plan.window_s:g} s"
    if ram is None:
        yield "The trace has no times, so what links and disks must bear can not be told."
    elif ram < LITTLE * plan.nearly_all_nbytes:
        yield f"Of those {knee} nearly all may be disk: disks would have to read no {worst}."
    elif ram < plan.nearly_all_nbytes:
        yield (
            f"Of those {knee}, {human_nbytes(ram)} should be RAM, and the rest may be disk: "
            f"with less RAM disks would have to read {worst}."
        )
    else:
        yield f"All of it should be RAM: disks would have to read {worst}."


def _of_ram(plan: Plan) -> str:
    """Whether more would be of use: than was asked about, or than where it begins to be of little."""
    rams = sorted((row for row in plan.rows if not row.disk_nbytes), key=lambda row: row.ram_nbytes)
    row, gain = rams[-1], 0.0
    for row in rams[-1:] if plan.ram_asked else rams:
        gain = row.hit_rate_doubled - row.hit_rate
        if row.pages >= plan.nearly_all_pages and gain < LITTLE:
            break
    size, rate = human_nbytes(row.ram_nbytes), percent(row.hit_rate)
    if row.pages >= plan.wanted_pages:
        return (
            f"RAM of {size} has all that is ever asked for again: more is of no use, nor is a disk but over a restart."
        )
    if gain < LITTLE and row.pages >= plan.nearly_all_pages:
        return f"More RAM than {size}, which gives {rate}, is of little use: twice as much adds {_points(gain)}."
    said = f"RAM of {size} alone gives {rate}, and twice as much {_points(gain)} more."
    if row.pages >= plan.nearly_all_pages:
        return f"{said} A disk adds at most {_points(plan.endless - row.hit_rate)}."
    disk, more = human_nbytes(plan.nearly_all_nbytes), _points(NEARLY_ALL * plan.endless - row.hit_rate)
    return f"{said} A disk is needed for the rest: one of {disk} adds {more}."


def _of_disk(plan: Plan) -> Iterator[str]:
    """Of each that was asked about, beside the largest RAM."""
    ram, most = max(row.ram_nbytes for row in plan.rows), plan.disk_gb_per_s
    rows = {row.disk_nbytes: row for row in plan.rows if row.ram_nbytes == ram}
    for row in rows.values():
        if not row.disk_nbytes:
            continue
        gain = row.hit_rate - rows[0].hit_rate
        said = f"A disk of {human_nbytes(row.disk_nbytes)} beside RAM of {human_nbytes(ram)} adds {_points(gain)}"
        reads, writes = row.disk_reads.peak, row.disk_writes.peak
        if gain < LITTLE:
            yield f"{said}: for hits it is hardly worth it; it keeps the pages over a restart."
        elif reads is None or writes is None:
            yield f"{said}."
        else:
            more = f", more than the {most:g} that disks are believed to do" if max(reads, writes) > most else ""
            yield f"{said}. At the worst it reads {reads:.2f} GB/s and writes {writes:.2f}{more}."


def _of_policy(rows: Sequence[Row]) -> str:
    """Where the most is lost."""
    far = [row for row in rows if row.hit_rate < NEAR_BOUND * row.bound]
    if not far:
        return "At all these sizes the store is within 5 % of what any policy could hit: only size helps."
    row = max(far, key=lambda row: row.bound - row.hit_rate)
    size = f"RAM of {human_nbytes(row.ram_nbytes)}"
    if row.disk_nbytes:
        size += f" and disk of {human_nbytes(row.disk_nbytes)}"
    return (
        f"With {size} the store hits {percent(row.hit_rate)}, and who knew the future {percent(row.bound)}: "
        "a better policy could gain a part of that, no policy more."
    )


def _of_copies(plan: Plan) -> Iterator[str]:
    costs = {(cost.copies, cost.near_share): cost for cost in plan.copy_costs}
    share = plan.near_share if (1, plan.near_share) in costs else 0.0
    one, two = costs[1, share], costs[2, share]
    yield (
        f"Two owners for each page (R=2) cost {_points(one.hit_rate - two.hit_rate)} at the largest size of the table, "
        f"or twice the bytes for the same: the knee is at {human_nbytes(two.nearly_all_nbytes)} then."
    )
    near = max((cost for cost in plan.copy_costs if cost.copies == plan.copies), key=lambda cost: cost.near_share)
    if near.near_share:
        lost = costs[plan.copies, 0.0].hit_rate - near.hit_rate
        yield (
            f"Near copies cost at most {_points(lost)} there, if they fill {percent(near.near_share)} of the RAM; "
            "they go before all other pages."
        )
