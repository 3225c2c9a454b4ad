"""Settings: their sources and ranges, and errors that name the setting and its range."""

import pathlib
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hermetic
import pytest

from gpu_agent.options import AgentConfig, agent_config
from kvstore import Client, ClientConfig, ConfigError, client_config, environment
from kvstore.config import (
    CLIENT_VARIABLES,
    Address,
    explicit_config,
    load,
    parse_address,
    split_address,
    variables_of,
)
from kvstore.environment import OTHER_VARIABLES, log_unknown
from kvstore.security.secrets import tenant_of
from kvstore.units import format_nbytes, parse_nbytes
from node.config import NodeConfig

ROOT = pathlib.Path(__file__).parents[2]


def test_explicit_values_override_environment_and_defaults() -> None:
    environ = {
        "KVSTORE_TIMEOUT_S": "7",
        "KVSTORE_WIRE": "grpc",
        "KVSTORE_ADDRESS": "",
        "UNRELATED": "x",
    }
    config = load(ClientConfig, "KVSTORE", {"wire": "bulk", "timeout_s": None}, environ)
    assert config == ClientConfig(wire="bulk", timeout_s=7.0)


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", "node-7:1234")
    assert client_config().address == "node-7:1234"


def test_settings_that_are_not_given_come_from_the_environment_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`Client()`, `Client("h")`, `Client(ClientConfig("h"))` and agents read the same variables.

    Regression: `ClientConfig(address=...)` ignored them, and errors told to set what was set.
    """
    token = tmp_path / "token"
    token.write_text("team-a.of-a-file")
    token.chmod(0o600)
    monkeypatch.setenv("KVSTORE_ADDRESS", "node-7:1234")
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "7")
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(token))
    monkeypatch.setenv("KVSTORE_AGENT_WORKERS", "5")
    configs = [ClientConfig("h:1"), ClientConfig(address="h:1"), client_config(address="h:1")]
    with Client() as client:
        assert client.config == replace(configs[0], address="node-7:1234")
    for made in (Client("h:1"), *map(Client, configs)):
        with made as client:
            assert client.config == configs[0]
            assert (client.config.timeout_s, client.tenant) == (7.0, "team-a")
    assert AgentConfig(hashers=1).workers == agent_config(hashers=1).workers == 5
    assert ClientConfig("h:1", timeout_s=3.0, connect_timeout_s=1.0).timeout_s == 3.0
    own = ClientConfig(token="team-b.own")
    assert tenant_of(own) == tenant_of(replace(own, wire="bulk")) == "team-b"
    assert explicit_config(address="h:1") == ClientConfig(
        **{**asdict(configs[0]), "timeout_s": 5.0, "token_file": ""}
    )
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "soon")
    with pytest.raises(ConfigError, match="KVSTORE_TIMEOUT_S='soon' is no number"):
        ClientConfig()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"timeout_s": 0.0}, r"timeout_s=0.0 is outside 0.001\.\.3600"),
        ({"timeout_s": float("nan")}, "timeout_s=nan is outside"),
        ({"timeout_s": float("inf")}, "timeout_s=inf is outside"),
        ({"timeout_s": True}, "timeout_s=True must be a float"),
        (
            {"timeout_s": 1.0, "connect_timeout_s": 2.0},
            "connect_timeout_s=2.0 must not exceed timeout_s=1.0",
        ),
        ({"connections_max": 0}, r"connections_max=0 is outside 1\.\.256"),
        ({"connections_max": 2.5}, "connections_max=2.5 must be a int"),
        ({"wire": "rdma"}, "wire='rdma' must be one of auto, bulk, grpc"),
        ({"address": "host:port"}, "address 'host:port' is not host:port"),
        ({"address": "host:0"}, r"port in 1\.\.65535"),
        ({"address": "host:65536"}, r"port in 1\.\.65535"),
        ({"address": ":7440"}, "address"),
        ({"address": ""}, "address"),
        ({"backoff_s_max": 1e9}, "backoff_s_max"),
    ],
)
def test_invalid_client_setting_is_named_with_its_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ClientConfig(**values)


@pytest.mark.parametrize("name", ["token", "page_key"])
def test_secret_of_the_wrong_type_is_named_without_its_value(name: str) -> None:
    values: dict[str, Any] = {name: b"ab" * 32}
    with pytest.raises(ConfigError, match=f"^{name} must be a str$"):
        ClientConfig(**values)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1b", 1),
        ("64KiB", 65536),
        ("64k", 65536),
        ("64 G", 64 << 30),
        ("12kb", 12_000),
        ("64GB", 64 * 10**9),
        ("1.5TiB", 3 << 39),
        ("1.5MiB", 3 << 19),
        (" 2gib ", 2 << 30),
        ("1e9", 10**9),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes
    assert parse_nbytes(format_nbytes(nbytes)) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "1x", "1 2", "nan", "inf", "infk", "1ib", "2GBs", "0x10", "-1", "1GiB/s"],
)
def test_invalid_size_error_lists_the_forms(text: str) -> None:
    """Regression: the error of 2GB was Python's: could not convert string to float: '2g'."""
    with pytest.raises(ValueError, match=r"is not a size; write for example 4096, 512MiB, 64GiB"):
        parse_nbytes(text)


def unknown(caplog: pytest.LogCaptureFixture, known: set[str], own: str, *names: str) -> list[str]:
    """Return the warnings about variables of these names or NAME=value."""
    caplog.clear()
    pairs = (name.partition("=") for name in names)
    log_unknown({name: value or "x" for name, _, value in pairs}, known, own)
    return [record.getMessage() for record in caplog.records]


def test_unknown_variables_are_named_once_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_logged", set())
    names = ("KVSTORE_ADRESS", "KVSTORE_NODE_RAM_BYTE", "KVSTORE_AGENT_WORKRES", "KVSTORE_SALT")
    said = ["KVSTORE_ADRESS sets nothing; did you mean KVSTORE_ADDRESS?"]
    assert unknown(caplog, CLIENT_VARIABLES, "", *names, "OTHER", "KVSTORE_WIRE") == said
    assert unknown(caplog, CLIENT_VARIABLES, "", *names) == []
    known = CLIENT_VARIABLES | variables_of(NodeConfig, "KVSTORE_NODE")
    assert unknown(caplog, known, "KVSTORE_NODE_", *names, "KVSTORE_RAM_BYTES", "KVSTORE_XYZ") == [
        "KVSTORE_NODE_RAM_BYTE sets nothing; did you mean KVSTORE_NODE_RAM_BYTES?",
        "KVSTORE_RAM_BYTES sets nothing; did you mean KVSTORE_NODE_RAM_BYTES?",
        "KVSTORE_XYZ sets nothing",
    ]


def test_variables_of_kubernetes_services_are_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets them in each pod, for the Services kvstore and kvstore-node."""
    monkeypatch.setattr(environment, "_logged", set())
    links = {
        f"KVSTORE_{service}{name}": value
        for service in ("", "NODE_", "NODE_BULK_")
        for name, value in (
            ("SERVICE_HOST", "10.0.0.7"),
            ("SERVICE_PORT", "7440"),
            ("SERVICE_PORT_GRPC", "7440"),
            ("PORT", "tcp://10.0.0.7:7440"),
            ("PORT_7440_TCP", "tcp://10.0.0.7:7440"),
            ("PORT_7440_TCP_PROTO", "tcp"),
            ("PORT_7440_TCP_ADDR", "10.0.0.7"),
        )
    }
    known = CLIENT_VARIABLES | variables_of(NodeConfig, "KVSTORE_NODE")
    assert unknown(caplog, known, "KVSTORE_NODE_", *map("=".join, links.items())) == []
    assert load(NodeConfig, "KVSTORE_NODE", {}, links) == NodeConfig()
    assert load(ClientConfig, "KVSTORE", {}, links) == ClientConfig()


def test_variables_of_tests_and_compose_files_are_known() -> None:
    read = {
        name
        for path in (ROOT / "docker").glob("*.yaml")
        for name in re.findall(r"\$\{(KVSTORE_\w+)", path.read_text())
        if not name.startswith("KVSTORE_NODE_")
    }
    assert read | hermetic.OWN <= {*OTHER_VARIABLES}


def test_text_of_a_setting_is_parsed_as_people_write_it() -> None:
    environ = {
        "KVSTORE_NODE_LOG_LEVEL": "warn",
        "KVSTORE_NODE_LOG_FORMAT": "JSON",
        "KVSTORE_NODE_DRAIN_S": "2m",
        "KVSTORE_NODE_LEASE_S": "0.5m",
        "KVSTORE_NODE_SCRUB_BYTES_PER_S": "8MB/s",
    }
    config = load(NodeConfig, "KVSTORE_NODE", {"ram_nbytes": "64 GB"}, environ)
    assert (config.log_level, config.log_format) == ("WARNING", "json")
    assert (config.drain_s, config.lease_s, config.scrub_nbytes_per_s) == (120.0, 30, 8_000_000)
    assert 63_999 * 10**6 < config.ram_nbytes <= 64 * 10**9
    for text in ("1.5s", "soon"):
        with pytest.raises(ConfigError, match=rf"lease_s='{text}' is no number in 1\.\.300: "):
            load(NodeConfig, "KVSTORE_NODE", {"lease_s": text}, {})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host", ("host", 7440)),
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7440", ("::1", 7440)),
        ("::1", ("::1", 7440)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host", Address("grpc", "host", 7440)),
        ("bulk://host:7441", Address("bulk", "host", 7441)),
        ("bulk://[fe80::1]:1", Address("bulk", "fe80::1", 1)),
        ("unix:/run/kvstore/7440.sock", Address("unix", path="/run/kvstore/7440.sock")),
        ("unix:///run/kvstore/7440.sock", Address("unix", path="/run/kvstore/7440.sock")),
    ],
)
def test_addresses_of_frames(address: str, expected: Address) -> None:
    assert parse_address(address) == expected
    assert ClientConfig(f"n0:1, {address}").addresses == ("n0:1", address)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("bulk://host", "names no port; write bulk://HOST:7441"),
        ("bulk://::1", "names no port"),
        ("bulk://:7441", "is not bulk://host:port"),
        ("bulk://host:0", "with a port in 1..65535"),
        ("bulk://a/b:1", "is not bulk://host:port"),
        ("unix:run/x.sock", "is no absolute path; write unix:/PATH"),
        ("unix://run/x.sock", "is no absolute path"),
        ("unix:", "is no absolute path"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
        ("unix:/run/\0", "is no path of a Unix socket"),
        ("unix:/run/\ud800", "is no path of a Unix socket"),
    ],
)
def test_invalid_frame_address_is_refused_with_the_remedy(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_address(address)
    with pytest.raises(ConfigError, match=re.escape(message)):
        ClientConfig(f"n0:1,{address}")


@pytest.mark.parametrize(
    ("address", "wire", "message"),
    [
        (
            "bulk://host:1",
            "grpc",
            "wire=grpc is not to be had at address=bulk://host:1; write host:7440",
        ),
        ("unix:/x", "grpc", "write host:7440"),
        ("unix:/x", "bulk", "write bulk://host:7441"),
    ],
)
def test_wire_that_conflicts_with_the_address_is_refused(
    address: str, wire: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ClientConfig(address, wire=wire)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("http://host:7440", "write host:7440, without http://"),
        ("https://host", "write host:7440, without https://"),
        ("GRPC://host:1/path?query", "write host:1, without GRPC://"),
        ("tcp://[::1]:7440/", "write [::1]:7440, without tcp://"),
        ("http://", "write host:7440, without http://"),
        ("etcd://e0:2379/prod", "write host:7440 of one or more of the cluster's nodes"),
    ],
)
def test_url_as_an_address_is_refused_with_the_remedy(
    address: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the resolver was asked for a host named "http://host", and did not find it."""
    monkeypatch.setenv("KVSTORE_ADDRESS", f"n0:7440, {address}")
    for made in (
        lambda: split_address(address),
        lambda: ClientConfig(f"n0:1,{address}"),
        client_config,
    ):
        with pytest.raises(ConfigError, match=re.escape(remedy)) as refused:
            made()
        assert f"address={address!r} is a URL" in str(refused.value)


def test_url_with_a_password_is_refused_without_the_password() -> None:
    with pytest.raises(ConfigError, match=r"'http://\.\.\.@host:1' is a URL") as refused:
        split_address("http://user:secret@host:1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["host/path:80", "user@host:80", "ho st:80", "[http://host]:80", "bulk://host/x:1"]
)
def test_address_with_invalid_host_characters_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not (bulk://)?host:port"):
        split_address(address)


def test_config_is_immutable() -> None:
    with pytest.raises(AttributeError):
        ClientConfig().wire = "grpc"  # type: ignore[misc]
