"""A node's settings, by themselves and from the command line and environment of `kvstore-node`."""

import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from local_nodes import StartNode

from kvstore import ConfigError
from kvstore.config import load
from node.config import GROUPS, NodeConfig
from node.main import _parser, main

MIB = 1 << 20


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"KVSTORE_NODE_PORT": "http"}, r"KVSTORE_NODE_PORT='http' is no number in 0\.\.65535"),
        ({"KVSTORE_NODE_PORT": "7440.5"}, "KVSTORE_NODE_PORT='7440.5'"),
        ({"KVSTORE_NODE_PORT": "-1"}, r"port=-1 is outside 0\.\.65535"),
        ({"KVSTORE_NODE_RAM_BYTES": "lots"}, "KVSTORE_NODE_RAM_BYTES='lots'"),
        ({"KVSTORE_NODE_RAM_BYTES": "infg"}, "KVSTORE_NODE_RAM_BYTES='infg'"),
        ({"KVSTORE_NODE_RAM_BYTES": "1KiB"}, r"ram_nbytes=1024 is outside 4096\.\."),
        ({"KVSTORE_NODE_STALL_S": "nan"}, r"stall_s=nan is outside 0.05\.\.3600"),
        ({"KVSTORE_NODE_LOG_LEVEL": "LOUD"}, "log_level='LOUD' must be one of DEBUG, INFO"),
    ],
)
def test_invalid_environment_variable_is_named_with_its_range(
    environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(NodeConfig, "KVSTORE_NODE", {}, environ)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"extent_nbytes": 5000}, "extent_nbytes=5000 must be a multiple of 4096"),
        (
            {"ram_nbytes": MIB, "extent_nbytes": 2 * MIB},
            "extent_nbytes=2097152 .* at most ram_nbytes=1048576",
        ),
        (
            {"ram_nbytes": 64 * MIB, "extent_nbytes": MIB, "batch_nbytes_max": 4096},
            "batch_nbytes_max=4096 must be at",
        ),
        (
            {"ram_nbytes": MIB, "batch_nbytes_max": 2 * MIB},
            "batch_nbytes_max=2097152 .* at most ram_nbytes",
        ),
        ({"batch_keys_max": 1 << 15}, r"batch_keys_max=32768 is outside 1\.\.16384"),
        ({"grpc_threads": 3}, r"grpc_threads=3 is outside 4\.\."),
        ({"namespaces_max": 0}, "namespaces_max=0"),
        ({"drain_s": -1.0}, "drain_s=-1.0"),
        ({"host": 5}, "host=5 must be a str"),
    ],
)
def test_invalid_setting_is_named_with_its_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NodeConfig(**values)


@pytest.mark.parametrize(
    "ram_nbytes", [4096, 5000, 70_000, MIB, 100 * MIB, (1 << 30) + 1, 1 << 40, 1 << 46]
)
def test_defaults_are_consistent_for_any_ram_size(ram_nbytes: int) -> None:
    config = NodeConfig(ram_nbytes=ram_nbytes)
    assert 0 < config.extent_nbytes <= config.batch_nbytes_max <= config.ram_nbytes <= ram_nbytes
    assert config.ram_nbytes % config.extent_nbytes == config.extent_nbytes % 4096 == 0
    assert config.ram_nbytes > ram_nbytes - config.extent_nbytes, (
        "more than an extent was rounded off"
    )


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def run_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """Return a function that runs the command in this process, for starts that fail.

    Any exception other than SystemExit is a traceback, and fails the test.
    """
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(
        os, "umask", lambda _: 0o077
    )  # else it would stay set for all tests of this process
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def run(*flags: str, **environ: str) -> Ended:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["kvstore-node", *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port", "http"], {}, "port='http' is no number in 0..65535"),
        (
            ["--ram-bytes", "100TiB"],
            {},
            "--ram-bytes=109951162777600 is outside 4096..70368744177664",
        ),
        (["--extent-bytes", "5000"], {}, "--extent-bytes=5000 must be a multiple of 4096"),
        ([], {"KVSTORE_NODE_STALL_S": "-1"}, "--stall-s=-1.0 is outside 0.05..3600.0"),
        (
            [],
            {"KVSTORE_NODE_SESSIONS_MAX": "many"},
            "KVSTORE_NODE_SESSIONS_MAX='many' is no number in 1..16384",
        ),
        (["--ram-bytes", "60TiB"], {}, "bytes of memory available here"),
    ],
)
def test_invalid_setting_ends_the_command_with_status_2(
    run_node: Callable[..., Ended], flags: list[str], environ: dict[str, str], named: str
) -> None:
    done = run_node(*flags, **environ)
    assert done.status == 2
    assert done.stdout == ""
    assert named in done.stderr


def test_invalid_setting_prints_one_line_and_no_traceback() -> None:
    command = [sys.executable, "-m", "node.main", "--port", "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvstore-node: --port='http' is no number in 0..65535")
    assert done.stderr.count("\n") == 1, "no traceback"


def test_unknown_flag_ends_the_command_with_status_2(run_node: Callable[..., Ended]) -> None:
    done = run_node("--turbo")
    assert done.status == 2
    assert "--turbo" in done.stderr


FLAGS = {
    field.name: "--" + field.name.replace("nbytes", "bytes").replace("_", "-")
    for field in dataclasses.fields(NodeConfig)
    if not field.metadata.get("secret")
}
EXPERT = [field.name for field in dataclasses.fields(NodeConfig) if field.metadata.get("expert")]


def test_help_names_all_but_expert_settings_with_default_and_unit(
    run_node: Callable[..., Ended],
) -> None:
    done = run_node("--help")
    assert done.status == 0
    text = "".join(done.stdout.split())
    shown = set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE))
    shown -= {"--version", "--print-config", "--json"}
    assert shown == {flag for name, flag in FLAGS.items() if name not in EXPERT}
    assert "--etcd-password" not in shown, "everybody on the host can read command lines"
    for field in dataclasses.fields(NodeConfig):
        if field.name in FLAGS and field.name not in EXPERT:
            assert f"{field.metadata['help']}(default".replace(" ", "") in text, field.name
    for expected in (
        "(default 1GiB; 4KiB..64TiB)",
        "(default 8MiB/s; 0..1TiB/s)",
        "(default 10 s; 0 s..3600 s)",
        "(default 256; 1..16384)",
        "(default INFO; DEBUG, INFO, WARNING, ERROR)",
        "(default 127.0.0.1)",
        "(default empty)",
        "(default off)",
    ):
        assert expected.replace(" ", "") in text, expected
    assert "examples:" in text


def test_help_is_short_and_grouped(run_node: Callable[..., Ended]) -> None:
    done = run_node("--help")
    assert re.findall(r"^([A-Za-z]+):$", done.stdout, re.MULTILINE) == [
        "options",
        *GROUPS,
        "examples",
    ]
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped)) <= 40
    assert not set(grouped) & set(EXPERT)
    assert set(FLAGS) - set(grouped) - set(EXPERT) <= {"eviction"}, "a setting without a group"


@pytest.mark.parametrize("name", EXPERT)
def test_expert_setting_has_a_flag_and_a_variable(name: str) -> None:
    default = getattr(NodeConfig(), name)
    value = (
        default * 2
        if name in ("extent_nbytes", "batch_nbytes_max", "disk_extent_nbytes", "lease_s")
        else default / 2
    )
    text = f"{value or (64 << 20):.10g}"
    given = vars(_parser().parse_args([FLAGS[name], text]))
    variable = "KVSTORE_NODE" + FLAGS[name][1:].replace("-", "_").upper()
    by_flag = load(NodeConfig, "KVSTORE_NODE", given, {})
    by_variable = load(NodeConfig, "KVSTORE_NODE", {}, {variable: text})
    assert getattr(by_flag, name) == getattr(by_variable, name) == float(text) != default


def test_second_node_on_the_same_port_is_refused(
    run_node: Callable[..., Ended], start_node: StartNode
) -> None:
    node = start_node()
    host = ["--host", "127.0.0.1", "--ram-bytes", "16MiB"]
    grpc = run_node(*host, "--port", str(node.grpc.port), "--bulk-port", "0", "--metrics-port", "0")
    bulk = run_node(*host, "--port", "0", "--bulk-port", str(node.bulk.port), "--metrics-port", "0")
    metrics = run_node(
        *host, "--port", "0", "--bulk-port", "0", "--metrics-port", str(node.metrics.port)
    )
    for done, taken in (
        (grpc, node.grpc.port),
        (bulk, node.bulk.port),
        (metrics, node.metrics.port),
    ):
        assert done.status == 2
        assert "can not listen on 127.0.0.1" in done.stderr
        assert f"port={taken}" in done.stderr
        assert "is another node running" in done.stderr


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """`--ram-byte` was taken for `--ram-bytes` until another flag began in the same way."""
    with pytest.raises(SystemExit):
        _parser().parse_args(["--ram-byte", "64MiB"])
    said = capsys.readouterr().err
    assert said.startswith("kvstore-node: unrecognized arguments: --ram-byte")
    assert said.endswith("; see kvstore-node --help\n")
    assert said.count("\n") == 1
