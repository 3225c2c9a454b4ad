"""Add this project's wheel to an engine's environment without changing its packages.

    python3 add_agent.py /wheels [cuda12|cuda13]

Runs with the engine's own Python. It installs the wheel with all installed packages as constraints,
and then imports the agent. Exit status 0: added; 1: a package would have to change, which it names.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = "kvstore-llm"
# Match a version that pip accepts.
VERSION = re.compile(
    r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9.]+)?"
)
EXTRAS = ("", "cuda12", "cuda13")
TRIED = "import gpu_agent, kvstore; print('kvstore-llm', kvstore.__version__)"
NO_PIP = "has no pip; install it in an image of your own, FROM this one"


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if not 1 <= len(arguments) <= 2 or (arguments[1:] or [""])[0] not in EXTRAS:
        return _failed(
            "say where the wheel is, and cuda12, cuda13 or nothing: add_agent.py /wheels cuda12"
        )
    wheels, extra = sorted(Path(arguments[0]).glob("kvstore_llm-*.whl")), "".join(arguments[1:])
    if len(wheels) != 1:
        return _failed(f"{arguments[0]} holds {len(wheels)} wheels kvstore_llm-*.whl, and not one")
    if subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False
    ).returncode:
        return _failed(f"{sys.executable} {NO_PIP}")
    before = installed()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "engine.txt"
        pins = [
            f"{name}=={version}\n" for name, version in before.items() if VERSION.fullmatch(version)
        ]
        constraints.write_text("".join(pins))
        wanted = f"{OURS}[{extra}] @ {wheels[0].resolve().as_uri()}" if extra else str(wheels[0])
        words = [
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--constraint",
            str(constraints),
            wanted,
        ]
        # An engine's image often has a system's Python, which pip refuses to change by default.
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words],
            check=False,
            env={**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"},
        )
    if done.returncode:
        return _failed(
            "pip finds nothing that leaves the engine's packages as they are; what it says above "
            "names them"
        )
    after = installed()
    changed = [
        f"{name} {version} -> {after.get(name, 'gone')}"
        for name, version in before.items()
        if after.get(name) != version
    ]
    if changed:
        return _failed(f"of the engine's packages these have changed: {', '.join(changed)}")
    tried = subprocess.run([sys.executable, "-c", TRIED], check=False)
    if tried.returncode:
        return _failed("the agent can not be imported beside the engine")
    print(
        "added:",
        ", ".join(
            f"{name} {version}" for name, version in sorted(after.items()) if name not in before
        ),
    )
    return 0


def installed() -> dict[str, str]:
    """Return the versions of the distributions that this Python imports, without ours."""
    importlib.invalidate_caches()
    seen: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
        if name and name != OURS:
            seen.setdefault(name, found.version)
    return seen


def _failed(why: str) -> int:
    print(f"add_agent: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
