"""The command `kvstore doctor`: its output, JSON and exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

Kvstore = Callable[..., Any]
NOBODY = "127.0.0.1:1"


def test_doctor_of_a_healthy_node_exits_0(kvstore: Kvstore) -> None:
    ran = kvstore("doctor", "--timeout", "20")
    assert ran.code == 0, ran.stdout
    for line in (
        "this host",
        "connection to the node",
        "wires",
        "pages: put and get",
        "pages: clean-up",
    ):
        assert f"\n{line}\n" in f"\n{ran.stdout}"
    assert " 0 fail, " in ran.stdout.splitlines()[-1]
    assert "kvstore-doctor" not in kvstore("ls").stdout


def test_doctor_failure_has_a_remedy_and_is_in_the_last_line(kvstore: Kvstore) -> None:
    ran = kvstore("doctor", "-a", NOBODY)
    assert ran.code == 1
    assert "  fail     TCP" in ran.stdout
    assert "-> nothing listens there" in ran.stdout
    assert ran.stdout.splitlines()[-1].endswith(": failed TCP")


def test_doctor_prints_json(kvstore: Kvstore, shared_node: NodeProcess) -> None:
    ran = kvstore("doctor", "--json", "--timeout", "20")
    assert ran.code == 0
    found = ran.json
    assert found["address"] == shared_node.address
    assert found["fail"] == 0
    assert found["ok"] + found["warn"] + found["skipped"] == len(found["checks"])
    (bulk,) = [
        check for check in found["checks"] if (check["group"], check["name"]) == ("wires", "bulk")
    ]
    assert bulk == {
        "group": "wires",
        "of": "",
        "name": "bulk",
        "state": "ok",
        "found": f"works, at port {shared_node.bulk_port}",
        "remedy": "",
    }
    nobody = kvstore("doctor", "--json", "-a", NOBODY)
    assert (nobody.code, nobody.json["fail"]) == (1, 1)


def test_doctor_checks_a_data_directory(kvstore: Kvstore, tmp_path: Path) -> None:
    found = kvstore("doctor", "--json", "--timeout", "20", "--data-dir", str(tmp_path)).json[
        "checks"
    ]
    names = {check["name"]: check for check in found if check["group"] == "data directory"}
    assert {"data directory", "file system", "O_DIRECT", "room", "speed"} == set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wire", "pigeon"], "wire"),
        (["-a", "host:port"], "host:port"),
        (["--nothing"], "--nothing"),
    ],
)
def test_doctor_without_a_valid_address_ends_with_an_error(
    kvstore: Kvstore, arguments: list[str], message: str
) -> None:
    ran = kvstore("doctor", *arguments)
    assert (ran.code, ran.stdout) == (2, "")
    assert message in ran.stderr
