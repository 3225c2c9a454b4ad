"""docker/agent.Dockerfile adds the agent to an engine's image and changes none of its packages.

Here the engine is a virtual environment made by the test.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "add_agent.py"
DOCKERFILE = (ROOT / "docker" / "agent.Dockerfile").read_text()
AGENT = {"kvstore/__init__.py": "__version__ = '0.1.0'", "gpu_agent/__init__.py": ""}


def wheel(
    folder: Path,
    name: str,
    version: str,
    needs: tuple[str, ...] = (),
    files: dict[str, str] | None = None,
) -> Path:
    """Write a minimal wheel with the given files and requirements; return its path."""
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    extras = "".join(f"Requires-Dist: {need}\n" for need in needs)
    extras += "Provides-Extra: cuda12\n" * any("cuda12" in need for need in needs)
    metadata = (
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n{extras}"
    )
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents = {
        **(files or {f"{name}.py": ""}),
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": kind,
    }
    record = "".join(f"{file},,\n" for file in [*contents, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**contents, f"{about}/RECORD": record}.items():
            archive.writestr(file, content)
    return path


class Engine:
    """A virtual environment with pip and torch, in place of an engine's image."""

    def __init__(self, folder: Path) -> None:
        self.index, self.wheels = folder / "index", folder / "wheels"
        self.index.mkdir()
        self.wheels.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (folder / "pip").mkdir()
        for part in ("pip", f"pip-{importlib.metadata.version('pip')}.dist-info"):
            (folder / "pip" / part).symlink_to(Path(sysconfig.get_path("purelib")) / part)
        (site / "pip.pth").write_text(f"{folder / 'pip'}\n")
        for version in ("2.1.0+cu128", "3.0.0"):
            wheel(self.index, "torch", version)
        wheel(self.index, "newcomer", "1.5")
        wheel(self.index, "cupy_cuda12x", "13.0")
        self._site = site
        with zipfile.ZipFile(self.index / "torch-2.1.0+cu128-py3-none-any.whl") as archive:
            archive.extractall(site)  # as pip would do

    def add(self, *arguments: str) -> tuple[int, str]:
        given = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | given
        command: list[str | Path] = [self.python, SCRIPT, *(arguments or (str(self.wheels),))]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd="/"
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def has(self) -> dict[str, str]:
        return {
            found.name: found.version
            for found in importlib.metadata.distributions(path=[str(self._site)])
        }


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_agent_and_missing_packages_are_added_and_torch_stays(engine: Engine) -> None:
    """The agent and its missing packages are installed, also over an older agent; torch stays."""
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("newcomer>=1", "torch>=2.1"), AGENT)
    status, output = engine.add()
    assert status == 0, output
    assert output.endswith("added: newcomer 1.5\n")
    assert engine.has == {"kvstore-llm": "0.1.0", "newcomer": "1.5", "torch": "2.1.0+cu128"}
    (engine.wheels / "kvstore_llm-0.1.0-py3-none-any.whl").unlink()
    wheel(engine.wheels, "kvstore_llm", "0.2.0", ("newcomer>=1", "torch>=2.1"), AGENT)
    assert engine.add()[0] == 0
    assert engine.has == {"kvstore-llm": "0.2.0", "newcomer": "1.5", "torch": "2.1.0+cu128"}


@pytest.mark.long
def test_extra_adds_cupy(engine: Engine) -> None:
    wheel(
        engine.wheels,
        "kvstore_llm",
        "0.1.0",
        ("torch>=2.1", 'cupy-cuda12x>=13; extra == "cuda12"'),
        AGENT,
    )
    status, output = engine.add(str(engine.wheels), "cuda12")
    assert status == 0, output
    assert engine.has == {"kvstore-llm": "0.1.0", "cupy-cuda12x": "13.0", "torch": "2.1.0+cu128"}


def test_add_agent_refuses_to_change_the_engines_torch(engine: Engine) -> None:
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("torch>=3",), AGENT)
    status, output = engine.add()
    assert status == 1
    assert "torch==2.1.0+cu128" in output
    assert "pip finds nothing that leaves the engine's packages as they are" in output
    assert engine.has == {"torch": "2.1.0+cu128"}


@pytest.mark.long
def test_change_of_an_unconstrained_package_is_detected(engine: Engine) -> None:
    """A changed package is detected even if no constraint protects it.

    A version that pip can not parse can not be a constraint.
    """
    (about,) = (engine.python.parents[1] / "lib").glob(
        "python*/site-packages/torch-*.dist-info/METADATA"
    )
    about.write_text(about.read_text().replace("2.1.0+cu128", "2.1.0-of-our-own"))
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("torch>=3",), AGENT)
    status, output = engine.add()
    assert status == 1
    assert (
        "of the engine's packages these have changed: torch 2.1.0-of-our-own -> 3.0.0\n" in output
    )


@pytest.mark.long
def test_agent_that_can_not_be_imported_fails_the_build(engine: Engine) -> None:
    wheel(
        engine.wheels,
        "kvstore_llm",
        "0.1.0",
        (),
        {**AGENT, "gpu_agent/__init__.py": "import nothing_of_the_kind"},
    )
    status, output = engine.add()
    assert status == 1
    assert "nothing_of_the_kind" in output
    assert "the agent can not be imported beside the engine" in output


def test_add_agent_names_missing_tools(engine: Engine) -> None:
    assert "holds 0 wheels" in engine.add()[1]
    assert "say where the wheel is" in engine.add(str(engine.wheels), "cuda11")[1]


def test_dockerfile_has_its_sources_and_documented_arguments() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()] + re.findall(
        r"source=(docker/\S+?),", DOCKERFILE
    )
    assert "docker/add_agent.py" in sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    known = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    commands = (ROOT / "docs" / "kubernetes.md").read_text() + DOCKERFILE
    assert {"ENGINE_IMAGE", "EXTRA"} <= set(re.findall(r"--build-arg (\w+)=", commands)) <= known
    extras = re.findall(r"^(cuda\d+) =", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f'EXTRAS = ("", "{extras[0]}", "{extras[1]}")' in SCRIPT.read_text()
