"""Run the programs of a node, whose package `node` is on no other program's import path.

    kvstore-node ...    python -m kvstore.programs node.disk.io_worker ...

An engine's environment may have a package `node` of somebody else. So a wheel has ours in
`kvstore/_programs`, which only these programs search, and first. In a checkout it lies beside this
package.
"""

import importlib
import sys
from pathlib import Path

_APART = Path(__file__).with_name("_programs")


def installed() -> bool:
    """Return whether the node's package is here."""
    return any((folder / "node").is_dir() for folder in (_APART, _APART.parents[1]))


def search() -> None:
    """Let this process import the node's package."""
    if _APART.is_dir() and str(_APART) not in sys.path:
        sys.path.insert(0, str(_APART))


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of the node."""
    return [python, "-m", "kvstore.programs", module, *arguments]


def run(module: str) -> None:
    """Run the function `main` of a module."""
    search()
    importlib.import_module(module).main()


def node() -> None:
    """Run `kvstore-node`."""
    run("node.__main__")


def gateway() -> None:
    """Run `kvstore-gateway`."""
    run("node.gateway.main")


if __name__ == "__main__":
    del sys.argv[0]
    run(sys.argv[0])
