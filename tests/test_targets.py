"""Tests of make's targets.

Each target is documented, can be run, uses only files that exist and reports missing programs.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from targets import ROOT, commands_of, load_run, targets_of_make

RUN = load_run()
LINES_MAX = 150
RELEASES = ["test-lmcache-0.5.6"]
CI = ("check", "test-oldest", "test-grpcio", "test-protobuf", "test-dist")


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_makefile_is_short() -> None:
    assert len((ROOT / "Makefile").read_text().splitlines()) <= LINES_MAX


def test_every_target_is_documented() -> None:
    targets = targets_of_make() | set(RUN.TARGETS)
    described = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert targets - {"help"} <= described <= targets


def test_every_documented_target_exists() -> None:
    targets = targets_of_make() | set(RUN.TARGETS)
    for path in (
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/*.py"),
        ROOT / "SECURITY.md",
    ):
        named = set(re.findall(r"`make ([a-z]+(?:-[a-z]+)*)[ `]", path.read_text()))
        assert named <= targets, path


def test_help_lists_every_target() -> None:
    listed = set(re.findall(r"^make ([a-z-]+)", make("help").stdout, re.MULTILINE))
    assert (targets_of_make() | set(RUN.TARGETS)) - listed <= {"help", "lint", "types"}


@pytest.mark.parametrize("name", sorted(targets_of_make() | set(RUN.TARGETS)) + RELEASES)
def test_make_dry_run_of_target_succeeds(name: str) -> None:
    done = make("--dry-run", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != ""
    assert (f"tests/run.py {name}\n" in done.stdout) == (name in RUN.TARGETS or name in RELEASES)


@pytest.mark.parametrize("name", [*RUN.TARGETS, *RELEASES])
def test_target_uses_only_existing_paths(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = commands_of(name, monkeypatch, tmp_path)
    assert found != []
    words = [word for command in found for word in (*command.words, *command.variables.values())]
    paths = {word for word in words if word.startswith(("tests/", "benchmarks/", "docker/"))}
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_target_uses_command_line_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CYCLES", "7")
    monkeypatch.setenv("DIR", "/a b")
    (crash,) = commands_of("test-crash", monkeypatch, tmp_path)
    assert crash.words[1:] == ("tests/helpers/crash.py", "--cycles", "7", "--dir", "/a b")


def test_arguments_reach_pytest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGS", "-k 'this or that' -x")
    (etcd,) = commands_of("test-etcd", monkeypatch, tmp_path)
    assert etcd.words[-4:] == ("tests/etcd", "-k", "this or that", "-x")


def test_release_of_vllm_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM", "0.34.0rc1")
    (tests,) = commands_of("test-vllm-scheduler", monkeypatch, tmp_path)
    assert tests.words[0] == ".venv-vllm-official-0.34.0rc1/bin/python"
    for wrong in ("newest", "0.34; rm", "../0.33.0"):
        monkeypatch.setenv("VLLM", wrong)
        with pytest.raises(SystemExit):
            load_run().TARGETS["test-vllm-scheduler"]()


def test_install_script_refuses_a_release_that_does_not_exist(tmp_path: Path) -> None:
    """Before it downloads anything else."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *vllm==*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    script = str(ROOT / "tests" / "engines" / "vllm" / "install-official.sh")
    command = ["bash", script, str(tmp_path), "9.9.9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "pip finds no wheel of vllm 9.9.9 for this Python\n"


def test_ci_runs_targets_on_every_supported_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    run = [
        step["run"].replace("${{ matrix.target }}", str(row.get("target")))
        for job in jobs.values()
        for row in job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for step in job["steps"]
        if "run" in step
    ]
    targets = {re.fullmatch(r"make ([a-z-]+) PYTHON=python", line) for line in run}
    assert {found and found[1] for found in targets} == {*CI}
    assert set(CI) <= targets_of_make() | set(RUN.TARGETS)
    (oldest,) = re.findall(r'requires-python = ">=3.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert jobs["check"]["strategy"]["matrix"]["python"] == [
        f"3.{minor}" for minor in range(int(oldest), 15)
    ]


def test_commit_hooks_match_the_checks_of_make_check() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = [hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]]
    assert commands == [".venv/bin/ruff format", ".venv/bin/ruff check", ".venv/bin/mypy"]
    checked = make("--dry-run", "--old-file", ".venv/.ready", "check").stdout.splitlines()
    checks = [
        line.replace(" --check", "").removesuffix(" .") for line in checked if "/bin/" in line
    ]
    assert [line for line in checks if "pytest" not in line] == commands


def test_unknown_target_fails_with_the_list_of_targets() -> None:
    done = make("test-nothing-of-the-kind")
    assert done.returncode == 2
    assert (
        "there is no target test-nothing-of-the-kind; there are:\nmake test-hostile" in done.stderr
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("test-etcd", "needs etcd and etcdctl; on Debian: apt-get install etcd-server etcd-client"),
        ("test-clients", "needs Node.js 18 or newer with npm"),
        ("test-monitoring", "needs prometheus and promtool; on Debian: apt-get install prometheus"),
        ("test-console", "needs Chromium; on Debian: apt-get install chromium"),
        ("test-sglang", "needs Python 3.11 for the engines; set ENGINE_PYTHON=..."),
    ],
)
def test_missing_program_is_reported(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_run()
    monkeypatch.setattr(module, "setup", lambda: None)
    monkeypatch.setattr(module, "is_older", lambda *_: True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as ended:
        module.main([name])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"{missing}\n"


def test_environment_is_outdated_when_a_source_is_newer(tmp_path: Path) -> None:
    ready, source = tmp_path / "ready", tmp_path / "source"
    source.touch()
    assert RUN.is_older(ready, source)
    ready.touch()
    os.utime(source, (1, 1))
    assert not RUN.is_older(ready, source)
    os.utime(source, (time.time() + 60, time.time() + 60))
    assert RUN.is_older(ready, source)


@pytest.mark.parametrize(("end", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_exit_status_of_failed_command_is_kept(end: str, status: int) -> None:
    program = f"import os, sys; {end}"
    code = f"import run; run.run({sys.executable!r}, '-c', {program!r}); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "went on" in done.stdout) == (status, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_runner_waits_for_the_command(number: signal.Signals, tmp_path: Path) -> None:
    """The runner waits for the command to exit on SIGINT and SIGTERM, and returns its status.

    A terminal sends SIGINT to both processes; SIGTERM reaches only the runner, which forwards it.
    """
    ended = tmp_path / "ended"
    child = f"""
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{number.name}])
print("ready", flush=True)
signal.sigwait([signal.{number.name}])
time.sleep(0.5)
pathlib.Path({str(ended)!r}).touch()
sys.exit(3)
"""
    code = (
        f"import run; run.TARGETS['x'] = lambda: run.run({sys.executable!r}, '-c', {child!r}); "
        "run.main(['x'])"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as runner:
        assert runner.stdout is not None
        while runner.stdout.readline() != "ready\n":
            assert runner.poll() is None
        if number == signal.SIGINT:
            os.killpg(runner.pid, number)
        else:
            runner.send_signal(number)
        assert runner.wait(timeout=30) == 3
    assert ended.exists()


def test_signal_during_a_start_reaches_the_command() -> None:
    code = """
import run, signal, subprocess

class Signalled(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)

subprocess.Popen = Signalled
run.run("sleep", "60")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", timeout=30, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_command_ignores_hangups_under_nohup() -> None:
    child = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
    code = (
        "import run, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        f"[run.run(sys.executable, '-c', {child!r}) for _ in range(2)]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", timeout=60, check=True)
