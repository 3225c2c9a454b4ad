"""Pin the packages of the node's image and of its build, with the hashes of their files.

    python docker/lock.py

docker/requirements.txt has the image's packages, docker/build-requirements.txt those that build the
wheel in it. For each processor and Python version of the image, pip resolves them under
constraints.txt. Run it after a change of constraints.txt or of the dependencies in pyproject.toml.
It takes minutes.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
# pip evaluates conditions (python_version < "3.11") for the Python that it runs on. They have the
# same value for all of these versions, so this script runs on any of them.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROCESSORS = ("x86_64", "aarch64")
GLIBCS = (36, 34, 31, 28, 27, 17)  # of Debian 12 and older
HEAD = """# The packages of {whose} with the hashes of their files, for pip --require-hashes.
# Python {pythons}; glibc 2.36 and newer; {processors}. Made by docker/lock.py.
"""


def wanted() -> dict[str, tuple[str, list[str]]]:
    """Return the purpose of each lock file and its packages."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = said["project"], said["project"]["optional-dependencies"]
    image = [*project["dependencies"], *extras["node"], *extras["cli"]]
    return {
        "requirements.txt": ("the node's image", image),
        "build-requirements.txt": (
            "the build of the node's image",
            said["build-system"]["requires"],
        ),
    }


def resolved(python: str, processor: str, packages: Sequence[str]) -> list[dict[str, Any]]:
    """Return pip's report of what it would install for this Python and processor."""
    tags = [f"manylinux_2_{minor}_{processor}" for minor in GLIBCS] + [f"manylinux2014_{processor}"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--report",
        "-",
    ]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--target", "/nonexistent"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--python-version", python]
    command += [f"--platform={tag}" for tag in tags]
    said = subprocess.run(
        [*command, *packages], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    found: list[dict[str, Any]] = json.loads(said)["install"]
    return found


def locked(whose: str, packages: Sequence[str]) -> str:
    """Return the pinned packages with their hashes."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in PYTHONS:
        for processor in PROCESSORS:
            for package in resolved(python, processor, packages):
                about, file = package["metadata"], package["download_info"]["archive_info"]
                name = re.sub(r"[-_.]+", "-", about["name"]).lower()
                hashes.setdefault((name, about["version"]), set()).add(file["hashes"]["sha256"])
    names = [name for name, _ in hashes]
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit(f"several versions of {', '.join(sorted(twice))}: pin them in constraints.txt")
    lines = [HEAD.format(whose=whose, pythons=", ".join(PYTHONS), processors=", ".join(PROCESSORS))]
    for (name, version), of_files in sorted(hashes.items()):
        lines.append(
            f"{name}=={version}"
            + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(of_files))
            + "\n"
        )
    return "".join(lines)


def main() -> None:
    """Run the command line."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" not in PYTHONS:
        sys.exit(f"run this with Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}")
    for name, (whose, packages) in wanted().items():
        (ROOT / "docker" / name).write_text(locked(whose, packages))


if __name__ == "__main__":
    main()
