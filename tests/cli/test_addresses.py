"""Commands with every form of address."""

import json

import pytest
from cli_runner import Kvstore

from kvstore import Client, ClientConfig
from kvstore.config import light_wire
from kvstore.tools.node_process import NodeProcess


@pytest.fixture(scope="module")
def addresses(shared_node: NodeProcess) -> dict[str, str]:
    with Client(
        ClientConfig(shared_node.address, timeout_s=30.0, connect_timeout_s=20.0)
    ) as client:
        socket = client.node_status().shm.socket
    return {
        "grpc": shared_node.address,
        "bulk": f"bulk://127.0.0.1:{shared_node.bulk_port}",
        "unix": f"unix://{socket}",
    }


@pytest.mark.parametrize("form", ["grpc", "bulk", "unix"])
def test_status_and_bench_work_at_each_address(
    kvstore: Kvstore, addresses: dict[str, str], form: str
) -> None:
    shown = kvstore("status", "--address", addresses[form], "--json")
    assert (shown.code, shown.json["address"]) == (0, addresses[form])
    measured = kvstore(
        "bench", "--address", addresses[form], "--seconds", "0.2", "--page-nbytes", "4KiB", "--json"
    )
    assert measured.code == 0, measured.stderr


@pytest.mark.parametrize("form", ["bulk", "unix"])
def test_doctor_removes_its_pages_at_each_address(
    kvstore: Kvstore, addresses: dict[str, str], form: str
) -> None:
    found = kvstore("doctor", "--address", addresses[form], "--json")
    findings = json.loads(found.stdout)
    assert found.code == 0, findings
    assert "not all could be" not in found.stdout


def test_address_and_wire_are_read_from_the_environment(
    kvstore: Kvstore, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", addresses["bulk"])
    assert kvstore("status", "--json").json["address"] == addresses["bulk"]
    monkeypatch.setenv("KVSTORE_WIRE", "grpc")
    refused = kvstore("status")
    assert refused.code == 2
    assert "wire=grpc is not to be had at address=bulk://" in refused.stderr


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("bulk://host", "names no port"),
        ("unix:sock", "no absolute path"),
        ("http://host", "is a URL, not host:port"),
    ],
)
def test_invalid_address_is_refused_with_an_example(
    kvstore: Kvstore, address: str, message: str
) -> None:
    refused = kvstore("status", "--address", address)
    assert refused.code == 2
    assert message in refused.stderr
    assert "write" in refused.stderr


@pytest.mark.parametrize(
    ("address", "wire"),
    [
        ("a:1", "grpc"),
        ("a:1, b", "grpc"),
        ("bulk://a:1", "bulk"),
        ("a:1,bulk://a:1", "bulk"),
        ("unix:/x", "auto"),
        ("a:1,unix:/x", "auto"),
    ],
)
def test_light_wire_of_an_address(address: str, wire: str) -> None:
    assert light_wire(address) == wire
