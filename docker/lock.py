"""Write docker/requirements.txt: the packages of the image, pinned and with the hashes of their files.

    python docker/lock.py

Asks pip, for each processor and each Python that the image may have, what it would install under constraints.txt.
Run it after a change of constraints.txt or of the dependencies in pyproject.toml.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docker" / "requirements.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PROCESSORS = ("x86_64", "aarch64")
GLIBCS = (36, 34, 31, 28, 27, 17)  # of Debian 12 and all before
HEAD = """# The packages of the node's image with the hashes of their files, for pip --require-hashes: Python {pythons},
# glibc 2.36 and newer, {processors}. Made by docker/lock.py from pyproject.toml and constraints.txt.
"""


def wanted() -> list[str]:
    """Return what the image asks for: the base install and the extras `node` and `cli`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["node"], *extras["cli"]]


def resolved(python: str, processor: str) -> list[dict[str, Any]]:
    """Return pip's report of what it would install for this Python and processor."""
    tags = [f"manylinux_2_{minor}_{processor}" for minor in GLIBCS] + [f"manylinux2014_{processor}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--target", "/nonexistent"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--python-version", python]
    command += [f"--platform={tag}" for tag in tags]
    said = subprocess.run([*command, *wanted()], stdout=subprocess.PIPE, check=True, text=True).stdout
    found: list[dict[str, Any]] = json.loads(said)["install"]
    return found


def main() -> None:
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in PYTHONS:
        for processor in PROCESSORS:
            for package in resolved(python, processor):
                about, file = package["metadata"], package["download_info"]["archive_info"]
                name = re.sub(r"[-_.]+", "-", about["name"]).lower()
                hashes.setdefault((name, about["version"]), set()).add(file["hashes"]["sha256"])
    names = [name for name, _ in hashes]
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit(f"several versions of {', '.join(sorted(twice))}: pin them in constraints.txt")
    lines = [HEAD.format(pythons=", ".join(PYTHONS), processors=", ".join(PROCESSORS))]
    for (name, version), of_files in sorted(hashes.items()):
        lines.append(f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(of_files)) + "\n")
    TARGET.write_text("".join(lines))


if __name__ == "__main__":
    main()
