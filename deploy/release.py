"""Build a release and push it: wheel and sources, image, chart, checksums.

    make release VERSION=0.2.0                       build and check everything, push nothing
    make release VERSION=0.2.0 PUSH=1 INDEX=... IMAGE=... CHARTS=...

It checks the tree (version, changelog, tag, nothing uncommitted), then makes in dist/:

    kvstore_llm-VERSION-py3-none-any.whl, kvstore_llm-VERSION.tar.gz
    kvstore-VERSION.tgz      the Helm chart
    SHA256SUMS

and the image kvstore-node:VERSION. The files are the same bytes from every clone of a commit.

    INDEX     upload address of a Python index    UV_PUBLISH_TOKEN, or TWINE_USERNAME and
                                                  TWINE_PASSWORD
    IMAGE     repository of the image             REGISTRY_USERNAME and REGISTRY_PASSWORD, or
    CHARTS    repository of charts, oci://...     an earlier `docker login`, `helm registry login`

What has no address is built and not pushed. The index comes last, because a version that it has can
not be replaced. Image and chart may be pushed again. Exit status 0: all checks held, and with
--push everything was pushed.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("deploy/helm/kvstore")
IMAGE = "kvstore-node"
INDEX_CREDENTIALS = ("UV_PUBLISH_TOKEN", "UV_PUBLISH_PASSWORD", "TWINE_PASSWORD")


class CommandFailed(Exception):
    """A command that ended with another status than 0."""


@dataclass
class Push:
    """A command that publishes one artefact; `stdin` is a secret, which is never printed."""

    what: str
    command: Sequence[str]
    where: str
    stdin: str = ""


@dataclass
class Release:
    """Findings, files and pushes of a release, as the report shows them."""

    version: str
    problems: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    pushed: bool = False


def run(*command: str, root: Path, stdin: str = "", **variables: str) -> str:
    """Run a command and return its output; raises CommandFailed with the end of its output."""
    print("+", shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(
        command,
        cwd=root,
        input=stdin,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise CommandFailed(f"{command[0]} ended with status {done.returncode}: {last}")
    return done.stdout


# ---- checks ----------------------------------------------------------------------------------


def check(version: str, root: Path) -> list[str]:
    """Return what must be repaired before this version can be released, each with its remedy."""
    found = []
    named = re.search(
        r'^__version__ = "(.*)"$', (root / "kvstore/__init__.py").read_text(), re.MULTILINE
    )
    if named is None or named[1] != version:
        found.append(
            f"kvstore/__init__.py has version {named and named[1]}: set __version__ to {version}"
        )
    changelog = (root / "CHANGELOG.md").read_text()
    entry = re.search(rf"^## \[{re.escape(version)}\] - (.*)$", changelog, re.MULTILINE)
    if entry is None:
        found.append(f"CHANGELOG.md has no section [{version}]: write it")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", entry[1]):
        found.append(f"CHANGELOG.md says '{entry[1]}' for {version}: put the date there")
    if changed := run("git", "status", "--porcelain", root=root).splitlines():
        found.append(f"{len(changed)} files are not committed ({changed[0].strip()}): commit them")
    tag = f"v{version}"
    if tag not in run("git", "tag", "--points-at", "HEAD", root=root).split():
        found.append(f"this commit has no tag {tag}: git tag {tag}")
    chart = root / CHART / "Chart.yaml"
    if chart.exists():
        of_chart = re.findall(r'^(?:version|appVersion): "?([^"\n]+)"?', chart.read_text(), re.M)
        if set(of_chart) != {version}:
            found.append(f"{CHART}/Chart.yaml has {', '.join(of_chart)}: set both to {version}")
    return found


# ---- artefacts -------------------------------------------------------------------------------


def build(release: Release, root: Path, image: bool) -> None:
    """Build all artefacts; what this machine can not build goes to `left_out`."""
    dist, epoch_s = root / "dist", run("git", "log", "-1", "--format=%ct", root=root).strip()
    shutil.rmtree(dist, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "--directory", "dist"]
    run(*command, root=root, SOURCE_DATE_EPOCH=epoch_s)
    if (root / CHART / "Chart.yaml").exists():
        pack_chart(root / CHART, dist / f"kvstore-{release.version}.tgz", int(epoch_s))
    else:
        release.left_out.append(f"chart: {CHART} is not in this tree")
    files = sorted(path for path in dist.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (dist / "SHA256SUMS").write_text("".join(sums))
    release.built = [f"dist/{path.name}" for path in (*files, dist / "SHA256SUMS")]
    if not image:
        release.left_out.append("image: left out by --no-image")
    elif shutil.which("docker") is None:
        release.left_out.append("image: docker is not installed")
    else:
        flags = [f"{key}={os.environ[key]}" for key in ("BASE", "SOURCE") if os.environ.get(key)]
        make = os.environ.get("MAKE", "make")
        flags.append(f"VERSION={release.version}")
        try:
            run(make, "--no-print-directory", "image", *flags, root=root)
            release.built.append(f"{IMAGE}:{release.version}")
        except CommandFailed as error:
            release.problems.append(f"image: {error}")


def pack_chart(chart: Path, target: Path, epoch_s: int) -> None:
    """Write a chart's files as `helm package` does, with fixed times, owners and order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(chart.rglob("*")):
            if path.is_file():
                info = tarfile.TarInfo(f"{chart.name}/{path.relative_to(chart).as_posix()}")
                info.size, info.mtime, info.mode = path.stat().st_size, epoch_s, 0o644
                with path.open("rb") as file:
                    archive.addfile(info, file)
    target.write_bytes(gzip.compress(buffer.getvalue(), mtime=epoch_s))


# ---- pushes ----------------------------------------------------------------------------------


def plan_pushes(release: Release, variables: Mapping[str, str]) -> None:
    """Add the commands that push what was built, and the problems that would stop them."""
    image, charts, index = (variables.get(name, "") for name in ("IMAGE", "CHARTS", "INDEX"))
    for name, address in (("IMAGE", image), ("CHARTS", charts), ("INDEX", index)):
        if not address:
            release.left_out.append(f"push: {name} is not set")
        if "@" in address.partition("://")[2]:
            release.problems.append(f"{name} has credentials in it: set the variables of --help")
            return
    user, password = (variables.get(f"REGISTRY_{name}", "") for name in ("USERNAME", "PASSWORD"))
    login = ["--username", user, "--password-stdin"]
    local = f"{IMAGE}:{release.version}"
    if image and local in release.built:
        remote = f"{image}:{release.version}"
        if user and password:
            command = ["docker", "login", *login, image.partition("/")[0]]
            release.pushes.append(Push("login", command, image, password))
        release.pushes.append(Push("image", ["docker", "tag", local, remote], remote))
        release.pushes.append(Push("image", ["docker", "push", remote], remote))
    chart = f"dist/kvstore-{release.version}.tgz"
    if charts and chart in release.built:
        _need(release, "helm")
        if not charts.startswith("oci://"):
            release.problems.append(f"CHARTS={charts}: write it as oci://HOST/PATH")
        if user and password:
            host = charts.removeprefix("oci://").partition("/")[0]
            command = ["helm", "registry", "login", *login, host]
            release.pushes.append(Push("login", command, charts, password))
        release.pushes.append(Push("chart", ["helm", "push", chart, charts], charts))
    if index:
        _plan_index(release, index, variables)


def _plan_index(release: Release, index: str, variables: Mapping[str, str]) -> None:
    """Add the upload to a Python index, by uv or else by twine."""
    files = [name for name in release.built if name.startswith("dist/kvstore_llm-")]
    if not any(variables.get(name) for name in INDEX_CREDENTIALS):
        release.problems.append("INDEX needs credentials: set UV_PUBLISH_TOKEN or TWINE_PASSWORD")
    if shutil.which("uv"):
        command = ["uv", "publish", "--publish-url", index, *files]
    else:
        _need(release, "twine", " or uv")
        command = ["twine", "upload", "--non-interactive", "--repository-url", index, *files]
    release.pushes.append(Push("wheel and sources", command, index))


def _need(release: Release, program: str, other: str = "") -> None:
    if shutil.which(program) is None:
        release.problems.append(f"{program}{other} is not installed, and pushes need it")


# ---- the command line ------------------------------------------------------------------------


def report(release: Release, push: bool) -> None:
    """Print what was built, and what is or would be pushed where."""
    for name in release.built:
        print(f"built     {name}")
    for what in release.left_out:
        print(f"left out  {what}")
    word = "pushed" if release.pushed else "not run" if push else "would run"
    for step in release.pushes:
        print(f"{word:9} {shlex.join(step.command)}")
    for problem in release.problems:
        print(f"problem   {problem}")
    if release.pushed:
        print(f"next      git push origin v{release.version}")
    elif not push and not release.problems:
        print("next      the same command with PUSH=1")


def as_json(release: Release) -> str:
    """Return the report as one JSON object."""
    steps = [
        {"what": step.what, "where": step.where, "command": list(step.command)}
        for step in release.pushes
    ]
    return json.dumps({**vars(release), "pushes": steps})


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--push", action="store_true", help="push; default: only say what would be")
    parser.add_argument("--no-image", dest="image", action="store_false", help="build no image")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    release = Release(args.version.removeprefix("v"))
    try:
        release.problems = check(release.version, root)
        if not (args.push and release.problems):
            build(release, root, args.image)
            plan_pushes(release, os.environ)
        if args.push and not release.pushes:
            release.problems.append("nothing to push: set INDEX, IMAGE or CHARTS")
        if args.push and not release.problems:
            for step in release.pushes:
                run(*step.command, root=root, stdin=step.stdin)
            release.pushed = True
    except CommandFailed as error:
        release.problems.append(str(error))
    print(as_json(release)) if args.json else report(release, args.push)
    return 1 if release.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
