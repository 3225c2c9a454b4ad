"""A node's settings, alone and as `kvstore-node` takes them from its command line and environment."""

import os
import subprocess
import sys
from typing import Any

import pytest

from kvstore import ConfigError
from kvstore.config import load
from kvstore.measure.node_process import NodeProcess
from node.config import NodeConfig

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
def test_a_bad_environment_is_named_with_its_range(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(NodeConfig, "KVSTORE_NODE", {}, environ)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"extent_nbytes": 5000}, "extent_nbytes=5000 must be a multiple of 4096"),
        ({"ram_nbytes": MIB, "extent_nbytes": 2 * MIB}, "extent_nbytes=2097152 .* at most ram_nbytes=1048576"),
        ({"ram_nbytes": 64 * MIB, "extent_nbytes": MIB, "batch_nbytes_max": 4096}, "batch_nbytes_max=4096 must be at"),
        ({"ram_nbytes": MIB, "batch_nbytes_max": 2 * MIB}, "batch_nbytes_max=2097152 .* at most ram_nbytes"),
        ({"batch_keys_max": 1 << 15}, r"batch_keys_max=32768 is outside 1\.\.16384"),
        ({"grpc_threads": 3}, r"grpc_threads=3 is outside 4\.\."),
        ({"namespaces_max": 0}, "namespaces_max=0"),
        ({"drain_s": -1.0}, "drain_s=-1.0"),
        ({"host": 5}, "host=5 must be a str"),
    ],
)
def test_a_bad_node_setting_is_named_with_its_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NodeConfig(**values)


@pytest.mark.parametrize("ram_nbytes", [4096, 5000, 70_000, MIB, 100 * MIB, (1 << 30) + 1, 1 << 40, 1 << 46])
def test_defaults_fit_together_whatever_the_ram(ram_nbytes: int) -> None:
    config = NodeConfig(ram_nbytes=ram_nbytes)
    assert 0 < config.extent_nbytes <= config.batch_nbytes_max <= config.ram_nbytes <= ram_nbytes
    assert config.ram_nbytes % config.extent_nbytes == config.extent_nbytes % 4096 == 0
    assert config.ram_nbytes > ram_nbytes - config.extent_nbytes, "more than an extent was given away"


def run_node(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.main", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, env={**os.environ, **environ}, check=False
    )


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port", "http"], {}, "port='http' is no number in 0..65535"),
        (["--ram-bytes", "100TiB"], {}, "ram_nbytes=109951162777600 is outside 4096..70368744177664"),
        (["--extent-bytes", "5000"], {}, "extent_nbytes=5000 must be a multiple of 4096"),
        ([], {"KVSTORE_NODE_STALL_S": "-1"}, "stall_s=-1.0 is outside 0.05..3600.0"),
        ([], {"KVSTORE_NODE_SESSIONS_MAX": "many"}, "KVSTORE_NODE_SESSIONS_MAX='many' is no number in 1..16384"),
        (["--ram-bytes", "60TiB"], {}, "bytes of memory available here"),
    ],
)
def test_a_bad_setting_ends_the_command_with_status_2(flags: list[str], environ: dict[str, str], named: str) -> None:
    done = run_node(*flags, **environ)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_ends_the_command_with_status_2() -> None:
    done = run_node("--turbo")
    assert done.returncode == 2
    assert "--turbo" in done.stderr


def test_help_names_every_setting_with_its_range() -> None:
    done = run_node("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "--ram-bytes" in text
    assert "; 1..16384)" in text
    assert "examples:" in text


def test_a_second_node_on_the_same_port_is_refused(shared_node: NodeProcess) -> None:
    port = shared_node.address.rpartition(":")[2]
    host = ["--host", "127.0.0.1", "--ram-bytes", "16MiB"]
    grpc = run_node(*host, "--port", port, "--bulk-port", "0", "--metrics-port", "0")
    bulk = run_node(*host, "--port", "0", "--bulk-port", str(shared_node.bulk_port), "--metrics-port", "0")
    metrics = run_node(*host, "--port", "0", "--bulk-port", "0", "--metrics-port", str(shared_node.metrics_port))
    for done, taken in ((grpc, port), (bulk, shared_node.bulk_port), (metrics, shared_node.metrics_port)):
        assert done.returncode == 2
        assert "can not listen on 127.0.0.1" in done.stderr
        assert f"port={taken}" in done.stderr
        assert "Traceback" not in done.stderr
