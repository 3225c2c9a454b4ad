"""The wheel of `make dist`, installed away from the sources: a node, the CLI and an engine's import
work from it.

Its dependencies come from this environment, so that no package index is needed. `make test-dist`
installs them into an empty environment, too, and names its interpreter in KVSTORE_DIST_PYTHON.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from built_wheel import installed, run

from kvstore.tools.node_process import NodeProcess
from node.console.console import NAMES

ROOT = pathlib.Path(__file__).parent.parent.parent

# A mock of torch, which takes seconds to import; with KVSTORE_DIST_PYTHON, the real torch is used
STAND_IN = (
    ""
    if os.environ.get("KVSTORE_DIST_PYTHON")
    else "import unittest.mock as m; sys.modules['torch'] = m.MagicMock()"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield an interpreter with the wheel and its dependencies, but without our sources."""
    named = os.environ.get("KVSTORE_DIST_PYTHON")
    if named:
        yield named
        return
    pytest.importorskip("hatchling", reason="the wheel can not be built without an index")
    work = tmp_path_factory.mktemp("wheel")
    python = installed(work)
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    # Somebody else's package of that name, as an engine's environment may have one
    (site / "node").mkdir()
    (site / "node" / "__init__.py").write_text("raise ImportError('this is another node')\n")
    yield str(python)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty directory, so that our sources are not found by accident."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def test_node_and_cli_work_from_the_wheel(python: str, tmp_path: pathlib.Path) -> None:
    page = os.urandom(65536)
    (tmp_path / "page").write_bytes(page)
    command = (str(pathlib.Path(python).parent / "kvstore"),)
    with NodeProcess(
        "--ram-bytes", "32MiB", "--data-dir", str(tmp_path / "data"), python=python
    ) as node:
        at = (*command, "--address", node.address)
        run(*at, "put", "--create-opaque", "m", "--tokens", "1", "--durable", tmp_path / "page")
        run(*at, "get", "--model", "m", "--tokens", "1", "--output", tmp_path / "back")
        assert "SERVING" in run(*at, "status")
    assert (tmp_path / "back").read_bytes() == page


def test_wheel_adds_no_package_that_is_called_node(python: str) -> None:
    code = """
import importlib.metadata as m
files = {str(file) for file in m.files("kvstore-llm")}
print(sorted({file.partition("/")[0] for file in files if ".." not in file}))
print("kvstore/_programs/node/__main__.py" in files)
"""
    tops, apart = run(python, "-c", code).splitlines()
    assert re.fullmatch(r"\['gpu_agent', 'kvstore', 'kvstore_llm-[\d.]+\.dist-info'\]", tops)
    assert apart == "True"


def test_engine_imports_its_adapter_from_the_wheel(python: str) -> None:
    """LightLLM can import its adapter: by its own name for it, from the folder that
    docs/engines/lightllm.md puts on the path.
    """
    folder = "os.path.dirname(gpu_agent.engines.__file__) + '/light_mem_path'"
    code = f"""
import os, sys
{STAND_IN}
import gpu_agent.engines
sys.path.append({folder})
import light_mem
print(light_mem.__file__)
"""
    where = run(python, "-c", code).strip()
    assert pathlib.Path(where).is_relative_to(pathlib.Path(python).parent.parent)


def test_wheel_has_files_that_are_not_python(python: str) -> None:
    where = (
        "(i.find_spec(name).submodule_search_locations[0] for name in ('gpu_agent', "
        "'kvstore', "
        "'node'))"
    )
    code = f"import importlib.util as i, kvstore.programs as p; p.search(); print(*{where})"
    gpu_agent, kvstore, node = map(pathlib.Path, run(python, "-c", code).split())
    assert (gpu_agent / "kernels" / "transfer.cu").is_file()
    assert (kvstore / "pb" / "kvstore_pb2.pyi").is_file()
    for package in (kvstore, gpu_agent):
        assert (package / "py.typed").is_file(), "type checkers ignore the types of this package"
    assert {name for name in NAMES if not (node / "console" / name).is_file()} == set()


PROGRAM = """
from kvstore import Client, PutOutcome
from gpu_agent.options import Identity

client = Client()
reveal_type(client.wire_name)
reveal_type(client.put)
reveal_type(Identity().tenant)
client.no_such_call()
outcome: PutOutcome = client.wire_name
"""


@pytest.mark.long
def test_type_checker_sees_the_types_of_the_wheel(python: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    config = "[mypy]\nstrict = true\n[mypy-torch.*,cryptography.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(config)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        python,
        "--cache-dir",
        os.devnull,
        "program.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    messages = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert messages[0] == 'note: Revealed type is "str"', done.stdout
    assert "kvstore.keys.Namespace" in messages[1], done.stdout
    assert messages[2] == 'note: Revealed type is "str"', done.stdout
    assert messages[3].startswith('error: "Client" has no attribute "no_such_call"'), done.stdout
    assert messages[4].startswith("error: Incompatible types in assignment"), done.stdout
    assert len(messages) == 6, done.stdout  # the last line has the number of errors
