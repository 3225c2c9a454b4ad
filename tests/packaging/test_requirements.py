"""The packages of the image and of its build are pinned with hashes, in the versions used in
development.
"""

import re
from pathlib import Path

import pytest
from image_packages import packages_of_the_image
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("requirements.txt", "build-requirements.txt")
IMAGE, BUILD = FILES
# The oldest Python for these files, which leave out constraints for older ones
OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(file: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Return the requirement and the hashes of each package of a file."""
    text = (ROOT / "docker" / file).read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    found: dict[str, tuple[Requirement, list[str]]] = {
        canonicalize_name(Requirement(words[0]).name): (Requirement(words[0]), words[1:])
        for words in lines
    }
    assert len(found) == len(lines) > 0, "a package is listed twice"
    return found


def pinned() -> dict[str, Requirement]:
    lines = [
        line.partition(" #")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    all_of_them = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {
        canonicalize_name(some.name): some
        for some in all_of_them
        if not some.marker or some.marker.evaluate(OLDEST)
    }


@pytest.mark.parametrize("file", FILES)
def test_each_package_of_image_and_build_has_a_version_and_hashes(file: str) -> None:
    for name, (requirement, hashes) in entries(file).items():
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), name
        assert hashes, name
        assert all(HASH.fullmatch(some) for some in hashes), name
        assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("file", FILES)
def test_hashed_packages_have_the_versions_of_constraints(file: str) -> None:
    pins, found = pinned(), entries(file)
    assert {name: str(found[name][0].specifier) for name in found if name in pins} == {
        name: str(pins[name].specifier) for name in found if name in pins
    }, "run docker/lock.py"


def test_hashed_packages_are_those_of_the_image() -> None:
    found = entries(IMAGE)
    assert set(found) == packages_of_the_image() - {"kvstore-llm"}, "run docker/lock.py"
    assert set(found) <= set(pinned())
    assert "hatchling" in entries(BUILD)


def test_image_and_audit_install_only_the_wheel_without_a_hash() -> None:
    texts = [(ROOT / "docker" / name).read_text() for name in ("node.Dockerfile", "audit.sh")]
    dockerfile, audit = (text.splitlines() for text in texts)
    installs = [line for line in dockerfile if re.search(r"\binstall .*(-r|\.whl|\.\[)", line)]
    installs += [line for line in audit if " .venv-image/bin/python install " in line]
    assert len(installs) == 5
    for line in installs:
        assert ("--require-hashes" in line) != (
            "--no-deps --no-index" in line and ".whl" in line
        ), line
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!docker/{file}" for file in FILES} <= set(ignored)
