"""Run the programs of a node, whose package `node` is on no other program's import path.

    kvstore-node ...    python -m kvstore.programs node.disk.io_worker ...

An engine's environment may have a package `node` of somebody else. So a wheel has ours in
`kvstore/_programs`, which only these programs search, and first. In a checkout it lies beside this
package.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError

_APART = Path(__file__).with_name("_programs")


def installed() -> bool:
    """Return whether the node's package is here."""
    return any((folder / "node").is_dir() for folder in (_APART, _APART.parents[1]))


def search() -> None:
    """Let this process import the node's package."""
    if _APART.is_dir() and str(_APART) not in sys.path:
        sys.path.insert(0, str(_APART))


def python() -> list[str]:
    """Return the start of a command whose process finds modules as this one does.

    The working directory is not searched first, unless this package is there.
    """
    if not sys.executable:
        raise ConfigError("this interpreter does not know its own file (sys.executable)")
    here = Path(__file__).resolve().parents[1]
    try:
        elsewhere = Path.cwd() != here
    except FileNotFoundError:  # somebody removed it
        elsewhere = True
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) and elsewhere else [])]


def command(module: str, *arguments: str, begin: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a module of the node."""
    return [*begin, "-m", "kvstore.programs", module, *arguments]


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
