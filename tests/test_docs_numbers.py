"""Numbers that the documents tell of the console, metrics, recordings and probes are those in use."""

import re
from pathlib import Path

import pytest

from kvstore.doctor.member import STREAK_MIN
from kvstore.keys import short
from kvstore.plan import pages, plan, survey
from node.config import NodeConfig
from node.console import console, history, members, snapshot
from node.console import pages as looked_up
from node.gateway import health, supervisor
from node.serve import heat, recorder, slow, tenants
from node.serve.traffic import BOUNDS_S

DOCS = Path(__file__).parent.parent / "docs"
BATCH_KEYS = NodeConfig(ram_nbytes=1 << 30).batch_keys_max

TOLD = {
    "console.md": [
        f"half and {100 * history.QUANTILES['p99']:g} of 100 of lookups, gets and puts, a sample each "
        f"{history.EVERY_S:g} s",
        f"asked through this node each {members.ASKED_S:g} s while somebody looks",
        f"what fills RAM and disk; the {snapshot.NAMESPACES_MAX} largest of each",
        f"by {len(short(bytes(32)))} digits",
        f"One lookup in {heat.EVERY} is looked at, at random intervals; of {heat.SIZE} heads, halved each "
        f"{heat.HALVED_S / 60:g} minutes",
        f"the newest {slow.KEPT} of more than {slow.SLOW_NS / 1e6:g} ms",
        f"each of at most {history.TENANTS_MAX} tenants",
        f"a status is made each {console.EVERY_S:g} s",
        f"who does not take an event in {console.STALL_S:g} s is hung up",
    ],
    "ARCHITECTURE.md": [
        f"silent for {supervisor.SILENT_S_MAX:g} s is killed; it answers `NOT_SERVING` itself when the node is silent "
        f"for {health.SILENT_S_MAX:g} s",
    ],
    "metrics.md": [f"Of the {tenants.TOLD_MAX} tenants"],
    "planning.md": [
        f"| {pages.TOKEN_NBYTES >> 10} KiB a token, and it says so |",
        f"({100 * plan.NEARLY_ALL:g} % of what a store that never forgets would hit)",
        f"at most `--copies-share` ({plan.NEAR_SHARE:g}) of a node",
        f"A chain that is longer than `--batch-keys-max` ({BATCH_KEYS:,}) pages",
        f"is at most {recorder.WAITING_PAGES_MAX:,} pages",
    ],
    "operations.md": [
        f"| one says nothing for {supervisor.SILENT_S_MAX:g} s | the node kills it",
        f"starts after {supervisor.PAUSE_S:g} s, after at most {supervisor.PAUSE_S_MAX:g} s where several end within a "
        "minute",
        f"the node hangs for {health.SILENT_S_MAX:g} s | gateways answer",
        f"| {NodeConfig().grpc_memory_nbytes >> 20} MiB for each gateway | gRPC.",
    ],
}


@pytest.mark.parametrize(("document", "said"), [(name, said) for name, some in TOLD.items() for said in some])
def test_a_number_that_is_told_is_the_one_in_use(document: str, said: str) -> None:
    assert said in " ".join((DOCS / document).read_text().split())


def test_numbers_that_are_told_in_words_are_those_in_use() -> None:
    assert history.KEPT * history.EVERY_S == 3600, "the last hour"
    assert snapshot.TENANTS_MAX == snapshot.NAMESPACES_MAX, "the 50 largest of each"
    assert looked_up.DIGITS_MIN == 4, "its first digits, four at least"
    assert snapshot.COST_FACTOR == 50, "a fiftieth of a core at most"
    assert console.AT_WORK_MAX == 2, "two for look-ups"
    assert supervisor.STREAK_S == 60, "several end within a minute"
    assert STREAK_MIN == 3, "three ends within a minute"
    assert recorder.ABANDONED_S == 60, "one that nobody fetches for a minute ends"
    assert survey.GROUPS == 8, "eight groups that stand for the whole"


def test_the_buckets_that_are_told_are_those_in_use() -> None:
    (told,) = re.findall(r"Buckets: (.+ s)\.", (DOCS / "metrics.md").read_text())
    bounds: list[float] = []
    for some, unit in re.findall(r"([\d., ]+?) (µs|ms|s)\b", told):
        factor = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        bounds += [float(number) * factor for number in some.strip(", ").split(", ")]
    assert bounds == pytest.approx(BOUNDS_S)
