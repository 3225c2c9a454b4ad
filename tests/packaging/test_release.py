"""`make release`: checks of the tree, equal bytes of the chart, and what is pushed where."""

import importlib.util
import json
import os
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "kvstore-llm"
version = "1.2.3"
requires-python = ">=3.10"
[tool.hatch.build.targets.wheel]
packages = ["kvstore"]
"""
# A stand-in for uv, docker and helm: it records its arguments and its input.
PROGRAM = '#!/bin/sh\necho "$(basename "$0") $* [$(cat)]" >> "$CALLS"\n'


def load_release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE = load_release()


def git(tree: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository that is ready to be released as `VERSION`."""
    tree = tmp_path / "tree"
    chart = tree / "deploy" / "helm" / "kvstore"
    for path, text in {
        tree / "pyproject.toml": PROJECT,
        tree / ".gitignore": "dist/\n",
        tree / "kvstore" / "__init__.py": f'__version__ = "{VERSION}"\n',
        tree / "CHANGELOG.md": f"# Changelog\n\n## [{VERSION}] - 2026-01-02\n",
        chart / "Chart.yaml": f"name: kvstore\nversion: {VERSION}\nappVersion: {VERSION}\n",
        chart / "templates" / "node.yaml": "kind: StatefulSet\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "first")
    git(tree, "tag", f"v{VERSION}")
    return tree


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins of uv, docker and helm on the path, and return the file of their calls."""
    for name in ("uv", "docker", "helm"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(PROGRAM)
        program.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("UV_PUBLISH_PASSWORD", "TWINE_PASSWORD", "UV_PUBLISH_TOKEN", "IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_tree_that_is_not_ready_is_refused_with_each_reason(tree: Path) -> None:
    assert RELEASE.check(VERSION, tree) == []
    (tree / "CHANGELOG.md").write_text(f"## [{VERSION}] - unreleased\n")
    problems = RELEASE.check(VERSION, tree)
    assert [problem.partition(":")[0] for problem in problems] == [
        f"CHANGELOG.md says 'unreleased' for {VERSION}",
        "1 files are not committed (M CHANGELOG.md)",
    ]
    git(tree, "commit", "--quiet", "--all", "--message", "second")
    problems = RELEASE.check("1.2.4", tree)
    assert [problem.rpartition(": ")[2] for problem in problems] == [
        "set __version__ to 1.2.4",
        "write it",
        "git tag v1.2.4",
        "set both to 1.2.4",
    ]


def test_unready_tree_is_not_built_for_a_push(
    tree: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tree, "tag", "--delete", f"v{VERSION}")
    assert RELEASE.main([VERSION, "--push"], tree) == 1
    assert not (tree / "dist").exists()
    assert not programs.exists()
    assert f"git tag v{VERSION}" in capsys.readouterr().out


def test_release_builds_and_pushes_each_artefact_with_hidden_credentials(
    tree: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("hatchling", reason="wheel and sdist can not be built without an index")
    for name, value in {
        "INDEX": "https://index.example/upload",
        "IMAGE": "registry.example/team/kvstore-node",
        "CHARTS": "oci://registry.example/charts",
        "UV_PUBLISH_TOKEN": "s3cret",
        "REGISTRY_USERNAME": "robot",
        "REGISTRY_PASSWORD": "s3cret",
        "MAKE": "true",  # `make image` needs a Docker
    }.items():
        monkeypatch.setenv(name, value)
    assert RELEASE.main([VERSION, "--json"], tree) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not programs.exists()
    assert planned["pushed"] is False
    chart = (tree / "dist" / f"kvstore-{VERSION}.tgz").read_bytes()
    os.utime(tree / "deploy" / "helm" / "kvstore" / "Chart.yaml", (1, 1))

    assert RELEASE.main([VERSION, "--push"], tree) == 0
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    assert (tree / "dist" / f"kvstore-{VERSION}.tgz").read_bytes() == chart
    wheel, sdist = f"kvstore_llm-{VERSION}-py3-none-any.whl", f"kvstore_llm-{VERSION}.tar.gz"
    assert programs.read_text().splitlines() == [
        "docker login --username robot --password-stdin registry.example [s3cret]",
        f"docker tag kvstore-node:{VERSION} registry.example/team/kvstore-node:{VERSION} []",
        f"docker push registry.example/team/kvstore-node:{VERSION} []",
        "helm registry login --username robot --password-stdin registry.example [s3cret]",
        f"helm push dist/kvstore-{VERSION}.tgz oci://registry.example/charts []",
        f"uv publish --publish-url https://index.example/upload dist/{wheel} dist/{sdist} []",
    ]
    done = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tree / "dist", check=True, capture_output=True
    )
    assert done.stdout.decode().count(": OK") == 3
    with tarfile.open(tree / "dist" / f"kvstore-{VERSION}.tgz") as packed:
        assert packed.getnames() == ["kvstore/Chart.yaml", "kvstore/templates/node.yaml"]
    programs.unlink()
    monkeypatch.setenv("MAKE", "false")
    assert RELEASE.main([VERSION, "--push"], tree) == 1
    assert "image: false ended with status 1" in capsys.readouterr().out
    assert not programs.exists(), "a version without its image"


def test_index_without_credentials_or_with_credentials_in_its_address_is_a_problem(
    programs: Path,
) -> None:
    def problems(**variables: str) -> list[str]:
        release = RELEASE.Release(VERSION, built=[f"dist/kvstore_llm-{VERSION}.tar.gz"])
        RELEASE.plan_pushes(release, variables)
        assert bool(release.problems) != bool(variables.get("TWINE_PASSWORD"))
        return list(release.problems)

    assert "set UV_PUBLISH_TOKEN" in problems(INDEX="https://index.example/")[0]
    assert problems(INDEX="https://index.example/", TWINE_PASSWORD="s3cret") == []
    (problem,) = problems(INDEX="https://robot:s3cret@index.example/")
    assert problem.startswith("INDEX has credentials in it")


def test_problem_after_the_build_stops_all_pushes(
    tree: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A version that is only half published can not be taken back."""
    monkeypatch.setattr(RELEASE, "build", build_chart)
    assert RELEASE.main([VERSION, "--push"], tree) == 1
    assert "nothing to push: set INDEX, IMAGE or CHARTS" in capsys.readouterr().out
    monkeypatch.setenv("CHARTS", "oci://registry.example/charts")
    monkeypatch.setenv("INDEX", "https://index.example/upload")
    assert RELEASE.main([VERSION, "--push"], tree) == 1
    assert "not run   helm push" in capsys.readouterr().out
    monkeypatch.delenv("INDEX")
    monkeypatch.setenv("CHARTS", "https://registry.example/charts")
    assert RELEASE.main([VERSION, "--push"], tree) == 1
    assert "write it as oci://HOST/PATH" in capsys.readouterr().out
    assert not programs.exists()


def build_chart(release: Any, root: Path, image: bool) -> None:
    release.built.append(f"dist/kvstore-{VERSION}.tgz")
