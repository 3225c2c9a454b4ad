"""The targets of the Makefile and of tests/run.py, and their commands without running them."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Command(NamedTuple):
    words: tuple[str, ...]
    variables: dict[str, str]


def load_run() -> ModuleType:
    """Import tests/run.py by path, because tests/ is not a package."""
    spec = importlib.util.spec_from_file_location("run_targets", ROOT / "tests" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets_of_make() -> set[str]:
    (phony,) = re.findall(
        r"^\.PHONY: ((?:.*\\\n)*.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    return set(phony.replace("\\\n", " ").split())


def commands_of(name: str, monkeypatch: pytest.MonkeyPatch, root: Path) -> list[Command]:
    """Return the commands of a target of tests/run.py, without running them.

    All programs are assumed to exist and all environments to be current. `root` replaces the
    project's folder, so that its real environments are not touched.
    """
    for path in (".venv", ".venv-oldest"):
        (root / path / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (root / "dist").mkdir()
    (root / "dist" / "kvstore_llm-0-py3-none-any.whl").touch()
    (root / "tests").symlink_to(ROOT / "tests")
    found: list[Command] = []
    module = load_run()
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "is_older", lambda *_: False)
    monkeypatch.setattr(
        module, "run", lambda *words, cwd=None, **variables: found.append(Command(words, variables))
    )
    monkeypatch.setattr(shutil, "which", lambda program: f"/bin/{program}")
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess((), 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    module.main([name])
    monkeypatch.undo()
    return found
