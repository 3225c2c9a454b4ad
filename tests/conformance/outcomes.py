"""Outcomes of cases, the table of them, and the exit status."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from session import Checks

# Outcome -> meaning, in the order of severity.
MEANINGS = {
    "wrong": "an answer differs from the one computed without a connector",
    "engine died": "the engine ended, hung, failed a request, or kept blocks",
    "did not start": "the engine does not start with the connector; without it, it does",
    "no hit": "all answers are right, but nothing was restored",
    "close": "all answers are right; some differ in the last bits, by rounding",
    "right": "all answers are right to the last bit",
    "skipped": "the case does not apply here; the reason is named",
}
FAILED = ("wrong", "engine died")
WIDTH = 100


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case for a model.

    `restored`: prompt tokens that hits covered; `wanted`: those that they should cover at least;
    `compared`: answers.
    """

    model: str
    case: str
    outcome: str
    restored: int = 0
    wanted: int = 0
    compared: int = 0
    seconds: float = 0.0
    details: tuple[str, ...] = ()

    def line(self) -> str:
        hits = str(self.restored) if self.wanted else ""
        start = f"{self.model:<12} {self.case:<18} {self.outcome:<13} {hits:>8}  "
        details = "; ".join(self.details)
        room = max(20, WIDTH - len(start))
        return (start + (details if len(details) <= room else details[: room - 1] + "…")).rstrip()


HEADER = f"{'model':<12} {'case':<18} {'outcome':<13} {'restored':>8}  details"


def outcome_of(model: str, case: str, checks: Checks, seconds: float) -> Outcome:
    """Return what a case's checks come to."""
    if checks.wrong:
        outcome = "wrong"
    elif checks.wanted and not checks.restored:
        outcome = "no hit"
    else:
        outcome = "close" if checks.close else "right"
    rounding = [f"rounding up to {checks.differs:.2f}"] if checks.close else []
    details = tuple(checks.wrong[:3] + checks.notes + rounding)
    return Outcome(
        model,
        case,
        outcome,
        checks.restored,
        checks.wanted,
        checks.compared,
        round(seconds, 1),
        details,
    )


def matrix(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a Markdown table: a row for each case, a column for each model."""
    models = list(dict.fromkeys(one.model for one in outcomes))
    cases = list(dict.fromkeys(one.case for one in outcomes))
    found = {(one.case, one.model): one.outcome for one in outcomes}
    rows = [["case", *models]]
    rows += [[case, *(found.get((case, model), "-") for model in models)] for case in cases]
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return lines


def status(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if something was wrong or died, 3 if nothing was restored at all, otherwise 0."""
    if any(one.outcome in FAILED for one in outcomes):
        return 1
    return 0 if any(one.restored for one in outcomes) else 3


def as_json(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    found = {**facts, "status": status(outcomes), "outcomes": [asdict(one) for one in outcomes]}
    return json.dumps(found, indent=1)
