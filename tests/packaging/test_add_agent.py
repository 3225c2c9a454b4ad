"""What docker/agent.Dockerfile does to an engine's image: the agent comes, and nothing that is
there changes. Here the engine is an environment of the test's own, with packages of its own.
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
    """A wheel of nothing but what is said here."""
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
    """A Python with pip and a torch."""

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
            archive.extractall(site)  # all that pip would do

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


def test_the_agent_and_what_it_lacks_come_and_torch_stays(engine: Engine) -> None:
    """Also again, over an older agent."""
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("newcomer>=1", "torch>=2.1"), AGENT)
    status, said = engine.add()
    assert status == 0, said
    assert said.endswith("added: newcomer 1.5\n")
    assert engine.has == {"kvstore-llm": "0.1.0", "newcomer": "1.5", "torch": "2.1.0+cu128"}
    (engine.wheels / "kvstore_llm-0.1.0-py3-none-any.whl").unlink()
    wheel(engine.wheels, "kvstore_llm", "0.2.0", ("newcomer>=1", "torch>=2.1"), AGENT)
    assert engine.add()[0] == 0
    assert engine.has == {"kvstore-llm": "0.2.0", "newcomer": "1.5", "torch": "2.1.0+cu128"}


def test_cupy_comes_with_its_extra(engine: Engine) -> None:
    wheel(
        engine.wheels,
        "kvstore_llm",
        "0.1.0",
        ("torch>=2.1", 'cupy-cuda12x>=13; extra == "cuda12"'),
        AGENT,
    )
    status, said = engine.add(str(engine.wheels), "cuda12")
    assert status == 0, said
    assert engine.has == {"kvstore-llm": "0.1.0", "cupy-cuda12x": "13.0", "torch": "2.1.0+cu128"}


def test_add_agent_refuses_to_change_the_engines_torch(engine: Engine) -> None:
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("torch>=3",), AGENT)
    status, said = engine.add()
    assert status == 1
    assert "torch==2.1.0+cu128" in said
    assert "pip finds nothing that leaves the engine's packages as they are" in said
    assert engine.has == {"torch": "2.1.0+cu128"}


def test_a_change_that_no_constraint_kept_off_is_found(engine: Engine) -> None:
    """A version that pip can not read is in no constraint."""
    (about,) = (engine.python.parents[1] / "lib").glob(
        "python*/site-packages/torch-*.dist-info/METADATA"
    )
    about.write_text(about.read_text().replace("2.1.0+cu128", "2.1.0-of-our-own"))
    wheel(engine.wheels, "kvstore_llm", "0.1.0", ("torch>=3",), AGENT)
    status, said = engine.add()
    assert status == 1
    assert "of the engine's packages these have changed: torch 2.1.0-of-our-own -> 3.0.0\n" in said


def test_an_agent_that_can_not_be_imported_ends_the_build(engine: Engine) -> None:
    wheel(
        engine.wheels,
        "kvstore_llm",
        "0.1.0",
        (),
        {**AGENT, "gpu_agent/__init__.py": "import nothing_of_the_kind"},
    )
    status, said = engine.add()
    assert status == 1
    assert "nothing_of_the_kind" in said
    assert "the agent can not be imported beside the engine" in said


def test_add_agent_names_missing_tools(engine: Engine) -> None:
    assert "holds 0 wheels" in engine.add()[1]
    assert "say where the wheel is" in engine.add(str(engine.wheels), "cuda11")[1]


def test_the_dockerfile_finds_what_it_copies_and_takes_what_is_said_of_it() -> None:
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
    told = (ROOT / "docs" / "kubernetes.md").read_text() + DOCKERFILE
    assert {"ENGINE_IMAGE", "EXTRA"} <= set(re.findall(r"--build-arg (\w+)=", told)) <= known
    extras = re.findall(r"^(cuda\d+) =", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f'EXTRAS = ("", "{extras[0]}", "{extras[1]}")' in SCRIPT.read_text()
