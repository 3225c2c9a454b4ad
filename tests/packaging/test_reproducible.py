"""`make dist` of one commit makes equal bytes in any place, at any time and with any umask."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="wheel and sdist can not be built without an index")

ROOT = Path(__file__).parents[2]
# The sources that are copied here; `make test-dist` clones the repository instead
SOURCES = (
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "kvstore",
    "node",
    "gpu_agent",
)
RELEASED_S = 1_700_000_000


def build(place: Path, umask: int, touched_s: int) -> dict[str, Path]:
    """Build wheel and sdist from a copy of the sources in `place`; return their paths by name.

    The copy is written with `umask`, and its files have the modification time `touched_s`.
    """
    place.mkdir(parents=True)
    before = os.umask(umask)
    try:
        if os.environ.get("KVSTORE_DIST_PYTHON"):
            subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
        else:
            _copy(place)
        for path in place.rglob("*"):
            if ".git" not in path.parts:
                os.utime(path, (touched_s, touched_s), follow_symlinks=False)
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(RELEASED_S)}
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--directory",
            place / "dist",
        ]
        subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True)
    finally:
        os.umask(before)
    return {path.name: path for path in (place / "dist").iterdir()}


def _copy(place: Path) -> None:
    for name in SOURCES:
        for source in [ROOT / name, *(ROOT / name).rglob("*")]:
            target = place / source.relative_to(ROOT)
            if source.is_dir():
                target.mkdir(exist_ok=True)
            elif "__pycache__" not in source.parts:
                shutil.copyfile(source, target)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Path]]:
    work = tmp_path_factory.mktemp("twice")
    return build(work / "one", 0o022, 1_600_000_000), build(
        work / "elsewhere" / "two", 0o077, 1_800_000_000
    )


def test_two_builds_are_equal_byte_by_byte(twice: tuple[dict[str, Path], dict[str, Path]]) -> None:
    one, two = (
        {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in built.items()}
        for built in twice
    )
    assert sorted(name.rpartition(".")[2] for name in one) == ["gz", "whl"]
    assert one == two


def test_archive_members_have_the_commit_time_and_no_owner(
    twice: tuple[dict[str, Path], dict[str, Path]],
) -> None:
    """Archive members have fixed times and owners.

    Two builds by one user in the same minute would be equal without that.
    """
    files = {path.suffix: path for path in twice[1].values()}
    with tarfile.open(files[".gz"]) as sdist:
        members = sdist.getmembers()
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {
        (RELEASED_S, 0, 0, "")
    }
    assert {member.mode & 0o777 for member in members} <= {0o644, 0o755}
    with zipfile.ZipFile(files[".whl"]) as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_wheel_has_all_files_of_the_packages(
    twice: tuple[dict[str, Path], dict[str, Path]],
) -> None:
    (wheel,) = (path for path in twice[0].values() if path.suffix == ".whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for top in ("kvstore", "node", "gpu_agent") for path in (ROOT / top).rglob("*.*")]
    assert found == {
        re.sub("^node/", "kvstore/_programs/node/", path.relative_to(ROOT).as_posix())
        for path in paths
        if path.is_file() and path.suffix != ".pyc"
    }
