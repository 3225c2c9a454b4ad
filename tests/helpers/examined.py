"""Run all checks of `kvstore doctor` and collect the findings."""

import contextlib

from kvstore import ClientConfig
from kvstore.doctor.checks import Finding, FindingState, run_all
from kvstore.doctor.runner import Runner, Wanted

NEEDS_REMEDY = (FindingState.WARN, FindingState.FAIL)


class Examined:
    def __init__(self, found: list[tuple[str, Finding]]) -> None:
        self.found = found

    def of(self, name: str, of: str = "", group: str = "") -> Finding:
        """Return the only finding of this name."""
        (finding,) = [
            finding
            for title, finding in self.found
            if (finding.name, finding.of) == (name, of) and title.startswith(group)
        ]
        return finding

    def names(self, state: FindingState) -> set[str]:
        return {
            f"{finding.of} {finding.name}".strip()
            for _, finding in self.found
            if finding.state is state
        }

    @property
    def failed(self) -> set[str]:
        return self.names(FindingState.FAIL)


def examined(config: ClientConfig, wanted: Wanted | None = None) -> Examined:
    """Run the checks, and verify that each finding has a text, and a remedy if it needs one."""
    found: list[tuple[str, Finding]] = []
    with contextlib.closing(Runner(config, wanted or Wanted()).groups()) as groups:
        for group in groups:
            found += [(group.title, finding) for finding in run_all(group.checks)]
    for _, finding in found:
        assert finding.found, finding
        assert bool(finding.remedy) or finding.state not in NEEDS_REMEDY, finding
    return Examined(found)
