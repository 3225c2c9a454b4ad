"""Tests of the suite's own parts that need no engine; `--self-test` tests the rest with lies."""

import ast
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comparison import close, equal
from configuration import Configuration, ConfigurationError, Store, StoreFailed, load
from engine_control import Answer, Engine, EngineDied, EngineRefused, Spawner
from outcomes import Outcome, matrix, outcome_of, status
from progress import telling
from session import Checks

SUITE = Path(__file__).parent
SHIPPED = sorted((SUITE / "configurations").glob("*.json"))


def answer(*tokens: int, logprob: float = -0.5, other: int = 99, finish: str = "length") -> Answer:
    likely = tuple({str(token): logprob, str(other): -1.0} for token in tokens)
    return Answer(tokens, likely, 0, finish)


def test_answers_are_equal_only_to_the_last_bit() -> None:
    assert equal(answer(1, 2), answer(1, 2))
    assert not equal(answer(1, 2), answer(1, 2, logprob=-0.5000001))
    assert not equal(answer(1, 2), answer(1, 3))


def test_close_answers_differ_by_rounding_only() -> None:
    assert close(answer(1, 2), answer(1, 2, logprob=-0.501), 0.01)
    assert not close(answer(1, 2), answer(1, 2, logprob=-0.6), 0.01)
    assert not close(answer(1), answer(1, 2), 0.01)
    assert not close(answer(1), answer(1, finish="error"), 0.01)


def test_other_token_is_close_only_where_both_are_as_likely() -> None:
    one = Answer((5, 7), ({"5": -0.70, "6": -0.71}, {"7": -0.1}), 0, "length")
    two = Answer((6, 8), ({"6": -0.70, "5": -0.71}, {"8": -0.1}), 0, "length")
    assert close(one, two, 0.05)
    three = Answer((6, 8), ({"6": -0.1, "5": -2.4}, {"8": -0.1}), 0, "length")
    assert not close(one, three, 0.05)


def test_outcomes_and_exit_status() -> None:
    right = outcome_of("llama", "full hit", Checks(exact=2, restored=64, wanted=64), 1.0)
    no_hit = outcome_of("llama", "restart", Checks(exact=2, wanted=64), 1.0)
    rounded = outcome_of("mla", "full hit", Checks(exact=1, close=1, restored=64, wanted=64), 1.0)
    wrong = outcome_of("llama", "boundaries", Checks(["127"], restored=64, wanted=64), 1.0)
    died = Outcome("mla", "boundaries", "engine died")
    found = [one.outcome for one in (right, no_hit, rounded, wrong, died)]
    assert found == ["right", "no hit", "close", "wrong", "engine died"]
    assert status([right, no_hit, rounded]) == 0
    assert status([no_hit]) == 3
    assert status([right, wrong]) == status([right, died]) == 1
    assert [line.split() for line in matrix([right, rounded, died])[2:]] == [
        ["|", "full", "hit", "|", "right", "|", "close", "|"],
        ["|", "boundaries", "|", "-", "|", "engine", "died", "|"],
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configuration_is_valid(path: Path) -> None:
    assert load(path).description


GIVEN = '{"kv_transfer_config": {"kv_connector": "X"}, %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "names no connector"),
        ('{"kv_role": "kv_both"}', "names no connector"),
        ('{"kv_transfer_config": {"kv_connector": "X"}, "stor": []}', "unknown fields: stor"),
        ('{"kv_transfer_config": null}', "names no connector"),
        (GIVEN % '"environment": {"A": 1}', "environment must be an object of texts"),
        (GIVEN % '"store": "program"', "store must be a list of texts"),
        (GIVEN % '"evict": ["rm"]', "evict must be a text"),
    ],
)
def test_bad_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path / "bad.json")


def test_store_is_started_killed_and_restarted(tmp_path: Path) -> None:
    serve = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])));"
        "time.sleep(60)"
    )
    config = {"kv_connector": "X", "kv_connector_extra_config": {"path": "{folder}/x"}}
    given = Configuration("x", config, store=["{python}", "-c", serve, "{port}"])
    store = Store(given, tmp_path, sys.executable)
    assert store.kv_transfer_config["kv_connector_extra_config"] == {
        "path": f"{tmp_path / 'data'}/x"
    }
    for _ in range(2):
        store.start()
        store.kill()
    broken = Store(Configuration("x", config, store=["{python}", "-c", "1 / 0"]), tmp_path, "false")
    with pytest.raises(StoreFailed, match="does not listen"):
        broken.start()


def test_end_by_a_signal_leaves_no_process(tmp_path: Path) -> None:
    """Regression: SIGTERM, as of `timeout`, left the store's program and the folder behind."""
    python = tmp_path / "python"  # in place of an interpreter with vLLM: engines never answer
    python.write_text(
        f"#!{sys.executable}\n"
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[2])\n"
        's.listen(); print(\'{"vllm": "0", "device": "cpu", "gpus": 0}\', flush=True)\n'
        "time.sleep(60)"
    )
    python.chmod(0o700)
    serve = (
        "import os, socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])));"
        "print(os.getpid(), file=open(sys.argv[2], 'w')); time.sleep(60)"
    )
    pid_file = tmp_path / "pid"
    store = [sys.executable, "-c", serve, "{port}", str(pid_file)]
    given = {"kv_transfer_config": {"kv_connector": "X"}, "store": store}
    (tmp_path / "given.json").write_text(json.dumps(given))
    command = [sys.executable, str(SUITE), str(tmp_path / "given.json"), "--python", str(python)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60.0
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    assert "interrupted in " in run.communicate(timeout=60.0)[1]
    assert run.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_engine_that_can_not_be_started_has_died(tmp_path: Path) -> None:
    """Regression: the suite ended with a traceback, and its outcomes were lost."""
    spawner: Any = SimpleNamespace(_path=str(tmp_path / "absent"), folder=tmp_path)
    with pytest.raises(EngineDied, match="the process that starts engines is gone"):
        Spawner.connect(spawner)


def test_engine_that_did_not_start_is_not_waited_for_again(tmp_path: Path) -> None:
    """Regression: the suite ended with a traceback, or waited ten minutes once more."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engines"))
        listener.listen()
        spawner: Any = SimpleNamespace(
            _path=listener.getsockname(), folder=tmp_path, facts={"device": "cpu"}
        )
        spawner.connect = lambda: Spawner.connect(spawner)
        refused, starting = (Engine(spawner, name, {}, {}) for name in ("refused", "starting"))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b'{"error": "no such model"}\n')
        for _ in range(2):
            with pytest.raises(EngineRefused, match="no such model"):
                assert refused.facts
        refused.kill()
        starting.kill()


def test_long_work_is_told() -> None:
    told = io.StringIO()
    with telling(lambda: "llama, full hit", 0.001, told):
        while told.getvalue().count("\n") < 2:
            time.sleep(0.001)
    assert told.getvalue().splitlines()[0] == "0 s: llama, full hit"


def suite(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SUITE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line_lists_and_refuses(tmp_path: Path) -> None:
    listed = suite("--list")
    assert listed.returncode == 0
    assert all(path.stem in listed.stdout for path in SHIPPED)
    refused = suite("folder", "--cases", "full hits", "--json")
    assert refused.returncode == 2
    assert "there is no case 'full hits'" in json.loads(refused.stdout)["error"]
    nameless = suite("folder", "--own", '{"dtype": "float32"}')
    assert nameless.returncode == 2
    assert "--own names no model" in nameless.stderr
    no_python = suite("folder", "--python", "/absent/python", "--json")
    assert no_python.returncode == 2
    assert "/absent/python can not be run" in json.loads(no_python.stdout)["error"]
    absent = suite(str(tmp_path / "absent.json"))
    assert absent.returncode == 2
    assert "can not be read" in absent.stderr


def test_suite_imports_nothing_of_this_project() -> None:
    for path in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] not in {"kvstore", "node", "gpu_agent"}, path
