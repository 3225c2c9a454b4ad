"""`kvstore-node` without the packages of its extra names the extra to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from node.main import EXTRA

HIDDEN = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in {names!r}:
            return super().find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
sys.argv = ["kvstore-node", *{arguments!r}]
from node.main import main
main()
"""


def node_without(names: tuple[str, ...], *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = HIDDEN.format(names=names, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (EXTRA, ()),
        *(
            pytest.param((name,), arguments, marks=pytest.mark.long)
            for name, arguments in (
                ("cryptography", ("--port", "0")),
                ("cryptography", ("--host", "none", "--encrypt-key-file", "k", "--data-dir", "d")),
                ("prometheus_client", ("--host", "none")),
                ("rocksdict", ("--host", "none", "--data-dir", "d")),
            )
        ),
    ],
)
def test_node_without_its_extra_names_it_in_one_line(
    names: tuple[str, ...], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = node_without(names, "--shm-socket", str(tmp_path / "socket"), *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstore-node: the Python package ")
    assert any(name in line for name in names)
    assert "pip install 'kvstore-llm[node]'" in line


def test_node_of_one_host_needs_only_what_vllm_installs(tmp_path: Path) -> None:
    """A node with RAM and a Unix socket needs one package of its extra, the metrics'."""
    socket = tmp_path / "socket"
    arguments = ("--host", "none", "--shm-socket", str(socket), "--ram-bytes", "16MiB")
    hidden = ("cryptography", "rocksdict", "grpc_health", "grpc_reflection")
    code = HIDDEN.format(names=hidden, arguments=arguments)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        try:
            said = node.stdout.readline()
        finally:
            node.terminate()
        assert said == f"kvstore-node ready grpc=none bulk=0 metrics=0 shm={socket}\n"
        assert node.wait(60) == 0


def test_node_without_its_extra_prints_version_and_help() -> None:
    assert node_without(EXTRA, "--version").returncode == 0
    assert "--ram-bytes" in node_without(EXTRA, "--help").stdout
