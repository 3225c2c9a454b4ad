"""Tests that the test environment is isolated from the machine, the user and the shell.

tests/helpers/hermetic.py isolates it. The last test here runs some sensitive tests in a hostile
environment; `make test-hostile` runs all of them.
"""

import locale
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import hermetic
import pytest
from hostile import VARIABLES, run

TESTS = Path(__file__).parent
# Tests that depend most on user settings: pip, the terminal, configuration, time zone and signals.
SENSITIVE = (
    "packaging/test_add_agent.py::test_add_agent_refuses_to_change_the_engines_torch",
    "cli/test_output.py",
    "core/test_config.py",
    "test_hermetic.py",
)


def test_environment_has_no_user_variables() -> None:
    for name, value in VARIABLES.items():
        assert os.environ.get(name) != value
    unknown = {
        name for name in os.environ if name.startswith(("PIP_", "KVSTORE_", "OTEL_", "GIT_", "LC_"))
    }
    assert unknown <= hermetic.OWN | hermetic.GIVEN


def test_engine_environment_keeps_caches_and_drops_settings() -> None:
    engines = {
        "HOME": "/home/me",
        "HF_HOME": "/models",
        "VLLM_CACHE_ROOT": "/cache",
        "PATH": "/bin",
    }
    settings = {
        "KVSTORE_TOKEN": "t",
        "PIP_CONSTRAINT": "c",
        "OTEL_SDK_DISABLED": "1",
        "TZ": "x",
        "PYTHONWARNINGS": "e",
    }
    environ = {**engines, **settings, "KVSTORE_NODE_PYTHON": "python"}
    hermetic.clean(environ, has_engine=True)
    assert environ == {**engines, "KVSTORE_NODE_PYTHON": "python"}
    hermetic.clean(environ, has_engine=False)
    assert environ == {"PATH": "/bin", "KVSTORE_NODE_PYTHON": "python"}


def test_variables_read_by_tests_are_kept() -> None:
    """Every environment variable that a test reads is on the list of kept variables.

    Otherwise the variable would silently have no effect.
    """
    read = re.compile(r"os\.environ\.get\(\s*\"(\w+)\"")
    for path in set(TESTS.rglob("*.py")) - {TESTS / "run.py"}:  # run.py starts pytest
        names = set(read.findall(path.read_text())) - hermetic.GIVEN
        kept = dict.fromkeys(names, "1")
        hermetic.clean(kept, has_engine="engines" in path.parts)
        assert set(kept) == names, f"{path}: add {names - set(kept)} to tests/helpers/hermetic.py"


def test_process_has_default_umask_locale_and_signals() -> None:
    umask = os.umask(0o022)
    assert umask == 0o022
    assert (time.tzname[0], locale.getpreferredencoding(False).upper()) == ("UTC", "UTF-8")
    code = """
import locale, os, signal, sys
print(oct(os.umask(0)), sys.flags.dev_mode, sys.warnoptions,
      locale.getpreferredencoding(False).upper(),
      sys.getfilesystemencoding(), signal.getsignal(signal.SIGHUP), os.path.expanduser("~"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0o22", "False", "[]", "UTF-8", "utf-8", "0", os.environ["HOME"]]


def test_pip_reads_no_configuration() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {line.partition("=")[0] for line in done.stdout.split()} == {
        ":env:.config-file",
        ":env:.disable-pip-version-check",
    }


def test_git_reads_no_user_configuration(tmp_path: Path) -> None:
    for words in (
        ["init", "--quiet"],
        ["commit", "--quiet", "--allow-empty", "--message", "first"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    command = ["git", "config", "--list", "--show-scope"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    theirs = [line for line in done.stdout.splitlines() if not line.startswith("local")]
    assert len(theirs) == len(hermetic.GIT_CONFIG.splitlines()) - hermetic.GIT_CONFIG.count("[")


@pytest.mark.skipif("KVSTORE_HOSTILE" in os.environ, reason="already in the hostile run")
@pytest.mark.parametrize(
    ("umask", "names"),
    [
        (0o077, SENSITIVE),
        (0o000, ["test_hermetic.py::test_process_has_default_umask_locale_and_signals"]),
    ],
)
def test_sensitive_files_pass_in_a_hostile_environment(
    umask: int, names: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(
        "xdist", reason="only workers are shielded from variables that the interpreter reads"
    )
    files = [str(TESTS / name) for name in names]
    options = ["-p", "no:cacheprovider", "--numprocesses", "1"]
    done = run([*options, *files], umask, tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
