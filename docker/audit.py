"""Run `make audit`: list the packages of the node's image, their licences and vulnerabilities.

    python docker/audit.py PYTHON SBOM CONSTRAINTS

PYTHON is an environment with the packages of the image. The list is written to SBOM as CycloneDX
JSON, with the same bytes for the same packages. pip-audit looks up these packages and the pins of
CONSTRAINTS.

Exit status 0: all packages were looked up, without a finding. 1: a vulnerability is known. 3: the
service could not be reached for all packages, so the result is unknown.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NOT_ASKED, VULNERABLE, WELL = 3, 1, 0
OURS = "kvstore-llm"
LINES_MAX = 3


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Return the path of a tool of this environment."""
    found = str(Path(sysconfig.get_path("scripts")) / command[0])
    return subprocess.run([found, *command[1:]], capture_output=True, text=True, check=False)


# ---- what is installed -----------------------------------------------------------------------


def write_sbom(python: str, path: Path) -> Any:
    """Write the list of packages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = (
        "--output-reproducible",
        "--of",
        "JSON",
        "--pyproject",
        "pyproject.toml",
        "-o",
        str(path),
    )
    done = tool("cyclonedx-py", "environment", *options, python)
    if done.returncode:
        sys.exit(f"cyclonedx-py ended with status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(path.read_text())


def licences(sbom: Any) -> list[str]:
    """Return a line per package."""
    lines = []
    for component in sorted(sbom["components"], key=lambda some: some["name"].lower()):
        named = [_licence(some) for some in component.get("licenses", [])]
        lines.append(
            f"{component['name']:26} {component['version']:12} "
            f"{', '.join(dict.fromkeys(named)) or 'NOT SAID'}"
        )
    return lines


def _licence(said: Any) -> str:
    inner = said.get("license", {})
    return str(said.get("expression") or inner.get("id") or inner.get("name"))


# ---- known vulnerabilities ---------------------------------------------------------------------


def ask(*what: str) -> str:
    """Return pip-audit's JSON; empty if it could not reach its service."""
    done = tool(
        "pip-audit", "--format", "json", "--progress-spinner", "off", "--timeout", "15", *what
    )
    return done.stdout


def verdict(said: str) -> tuple[int, list[str]]:
    """Return (exit status, lines) for pip-audit's answer."""
    try:
        dependencies = [some for some in json.loads(said)["dependencies"] if some["name"] != OURS]
    except (ValueError, KeyError, TypeError):
        return NOT_ASKED, [
            "the vulnerability service can not be reached from here: NOTHING IS KNOWN"
        ]
    known = [(some, flaw) for some in dependencies for flaw in some.get("vulns", [])]
    skipped = [some for some in dependencies if "vulns" not in some]
    lines = [
        f"VULNERABLE  {some['name']} {some['version']}: {flaw['id']}, {_mended(flaw)}"
        for some, flaw in known
    ]
    if skipped or not dependencies:
        lines.append(f"NOT LOOKED UP: {len(skipped)} of {len(dependencies)}")
        lines += [
            f"    {some['name']}: {some.get('skip_reason', 'no reason given')}"
            for some in skipped[:LINES_MAX]
        ]
        lines += [f"    and {len(skipped) - LINES_MAX} more"] if len(skipped) > LINES_MAX else []
    return (VULNERABLE if known else NOT_ASKED if skipped or not dependencies else WELL), lines


def _mended(flaw: Any) -> str:
    return (
        f"mended in {', '.join(flaw['fix_versions'])}"
        if flaw.get("fix_versions")
        else "not mended yet"
    )


def main(python: str, sbom: str, constraints: str) -> int:
    """Run the command line."""
    made = write_sbom(python, Path(sbom))
    print(f"{len(made['components'])} packages in the image beside ours; {sbom} has them all\n")
    print(*licences(made), "", sep="\n")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    questions = {
        "installed in the image": ("--path", site.stdout.strip()),
        f"pinned in {constraints}": ("--requirement", constraints, "--no-deps", "--disable-pip"),
    }
    statuses = []
    for name, what in questions.items():
        status, lines = verdict(ask(*what))
        statuses.append(status)
        print(
            f"{name}: {'nothing is known against any of them' if status == WELL else ''}",
            *lines,
            sep="\n    ",
        )
    return VULNERABLE if VULNERABLE in statuses else max(statuses)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit((__doc__ or "").strip())
    sys.exit(main(*sys.argv[1:]))
