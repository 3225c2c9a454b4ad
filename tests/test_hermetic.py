"""Nothing of the machine, the user or the shell reaches a test: tests/helpers/hermetic.py.

`make test-hostile` runs all tests as the last test here runs some.
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
# Tests that read most of what a user may have set: pip, the terminal, settings, the clock's zone,
# signals.
SENSITIVE = (
    "packaging/test_add_agent.py::test_add_agent_refuses_to_change_the_engines_torch",
    "packaging/test_add_agent.py::test_change_of_an_unconstrained_package_is_detected",
    "cli/test_output.py",
    "core/test_config.py",
    "node/test_node_config.py",
    "test_hermetic.py",
)


def test_environment_has_no_variable_of_the_user() -> None:
    for name, value in VARIABLES.items():
        assert os.environ.get(name) != value
    unknown = {
        name for name in os.environ if name.startswith(("PIP_", "KVSTORE_", "OTEL_", "GIT_", "LC_"))
    }
    assert unknown <= hermetic.OWN | hermetic.GIVEN


def test_environment_of_an_engine_keeps_its_caches_and_loses_settings() -> None:
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


def test_setting_that_a_test_reads_is_kept() -> None:
    """A knob that is not in the list would do nothing, and nobody would see it."""
    read = re.compile(r"os\.environ\.get\(\s*\"(\w+)\"")
    for path in set(TESTS.rglob("*.py")) - {TESTS / "run.py"}:  # which starts pytest
        names = set(read.findall(path.read_text())) - hermetic.GIVEN
        kept = dict.fromkeys(names, "1")
        hermetic.clean(kept, has_engine="engines" in path.parts)
        assert set(kept) == names, f"{path}: add {names - set(kept)} to tests/helpers/hermetic.py"


def test_process_is_as_every_other() -> None:
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


def test_git_reads_no_configuration_of_the_user(tmp_path: Path) -> None:
    for words in (
        ["init", "--quiet"],
        ["commit", "--quiet", "--allow-empty", "--message", "first"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    command = ["git", "config", "--list", "--show-scope"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    theirs = [line for line in done.stdout.splitlines() if not line.startswith("local")]
    assert len(theirs) == len(hermetic.GIT_CONFIG.splitlines()) - hermetic.GIT_CONFIG.count("[")


@pytest.mark.skipif("KVSTORE_HOSTILE" in os.environ, reason="this is that run")
@pytest.mark.parametrize(
    ("umask", "names"),
    [(0o077, SENSITIVE), (0o000, ["test_hermetic.py::test_process_is_as_every_other"])],
)
def test_sensitive_files_pass_in_a_hostile_environment(
    umask: int, names: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(
        "xdist", reason="what the interpreter itself reads is kept off its workers only"
    )
    files = [str(TESTS / name) for name in names]
    options = ["-p", "no:cacheprovider", "--numprocesses", "1"]
    done = run([*options, *files], umask, tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
