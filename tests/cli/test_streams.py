"""Commands as processes: streams that can not be written, missing extras, completion."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Namespace

Kvstore = Callable[..., Any]
NOBODY = "127.0.0.1:1"  # nothing listens on port 1
COMMAND = [sys.executable, "-m", "kvstore.cli.app"]


def test_closed_pipe_on_stdout_prints_no_error(kvstore: Kvstore) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ran = subprocess.run(
            [*COMMAND, "status"], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (ran.returncode, ran.stderr) == (141, b"")


# Unbuffered, a command fails where it prints; buffered, at the flush at its end
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["status"], ""),
        pytest.param(["status"], "1", marks=pytest.mark.long),
        (["ls", "--json"], "1"),
        pytest.param(["top", "--once", "-i", "0.05"], "1", marks=pytest.mark.long),
        pytest.param(["--help"], "1", marks=pytest.mark.long),
        pytest.param(["--version"], "1", marks=pytest.mark.long),
        pytest.param(["tokens", "add"], "", marks=pytest.mark.long),
        (["tokens", "add"], "1"),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_unwritable_stdout_is_an_error_without_a_traceback(
    kvstore: Kvstore,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    unbuffered: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    identities = tmp_path / "identities"
    if arguments[0] == "tokens":
        arguments = [*arguments, "a", "--tenant", "t", "-f", str(identities)]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 74, ran.stderr
    assert "stdout can not be written: No space left on device" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not identities.exists(), "an identity was added, but its token was not printed"


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.long)])
def test_unwritable_page_bytes_are_an_error(
    kvstore: Kvstore,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    space: Namespace,
    unbuffered: str,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    page = tmp_path / "page"
    page.write_bytes(os.urandom(1 << 16))
    key = "ab" * 16
    assert kvstore("put", str(page), key, "--create-opaque", space.model).code == 0
    get = ["get", "--model", space.model, key]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [*COMMAND, *get], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (74, 1)
    assert "stdout can not be written" in ran.stderr
    assert (
        subprocess.run([*COMMAND, *get], capture_output=True, check=True).stdout
        == page.read_bytes()
    )
    refused = kvstore(*get, "-o", "/dev/full", "--json")
    assert (refused.code, refused.error["kind"]) == (74, "Unwritten")
    assert refused.error["error"] == "can not write /dev/full: No space left on device"
    assert kvstore(*get, "-o", str(tmp_path / "copy")).code == 0
    assert (tmp_path / "copy").read_bytes() == page.read_bytes()


def test_command_with_a_closed_stdout_does_nothing(tmp_path: Path) -> None:
    """A command with a closed stdout does nothing, as its output would be lost without an error."""
    add = shlex.join(
        [*COMMAND, "tokens", "add", "a", "--tenant", "t", "-f", str(tmp_path / "identities")]
    )
    ran = subprocess.run(
        ["sh", "-c", f"exec {add} >&-"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ran.returncode, "stdout is closed" in ran.stderr) == (74, True)
    assert not (tmp_path / "identities").exists()


def test_unwritable_stderr_does_not_change_the_exit_code(kvstore: Kvstore, tmp_path: Path) -> None:
    add = [*COMMAND, "tokens", "add", "a", "--tenant", "t", "-f", str(tmp_path / "identities")]
    for status in (0, 2):  # the second time, the name exists already
        with open("/dev/full", "wb") as full:
            ran = subprocess.run(add, stdout=subprocess.PIPE, stderr=full, check=False)
        assert (ran.returncode, bool(ran.stdout)) == (status, status == 0)


def test_command_without_the_extra_names_it() -> None:
    script = (
        "import sys; sys.modules['typer'] = None; import kvstore; from kvstore.cli.app "
        "import "
        "main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "kvstore-llm[cli]" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_importing_kvstore_imports_neither_typer_nor_rich() -> None:
    script = (
        "import sys, kvstore, kvstore.tools.replay, kvstore.tools.bench, kvstore.cli.app; "
        "print([m for m in ('typer', 'rich', 'node', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_completion_offers_namespaces_and_is_silent_without_a_node(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    """Shell completion offers namespaces and models, and prints nothing without a node.

    The completions run in one process, because starting one for each takes long.
    """
    client.open(space)
    client.open(replace(space, model=f"{space.model};reboot"))
    asked = [
        ["ls", "-n", space.digest.hex()[:4]],
        ["ls", "-m", space.model[:12]],
        ["-a", NOBODY, "ls", "-n", "0"],
        ["l"],
    ]
    script = """
import os, sys
sys.argv = ["kvstore"]
from kvstore.cli import selection
from kvstore.cli.app import main
selection.TIMEOUT_S = 60.0  # its half a second may be too short on a busy machine
for words in sys.stdin.read().splitlines():
    os.environ |= {"COMP_WORDS": "kvstore " + words, "COMP_CWORD": str(len(words.split()))}
    try:
        main()
    except SystemExit:
        print("---", flush=True)
"""
    environ = {**os.environ, "_KVSTORE_COMPLETE": "complete_bash"}
    command, words = [sys.executable, "-c", script], "\n".join(map(" ".join, asked))
    ran = subprocess.run(
        command, env=environ, input=words, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    digests, models, nothing, commands, end = [offer.split() for offer in ran.stdout.split("---")]
    assert space.digest.hex() in digests
    assert models == [space.model]
    assert nothing == end == []
    assert "lookup" in commands


def test_character_that_the_encoding_lacks_is_no_traceback() -> None:
    """Regression: `kvstore top` ended so on a terminal that is not UTF-8."""
    program = "from kvstore.cli.output import guard_stdout; guard_stdout(); print('a\\u2026b')"
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for ascii_only in ({"PYTHONIOENCODING": "ascii"}, c_locale):
        environment = {**os.environ, **ascii_only}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=False
        )
        assert (done.stdout, done.stderr) == (b"a?b\n", b"")
