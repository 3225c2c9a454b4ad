"""The service `scrape` of docker/compose.monitoring.yaml makes a token for Prometheus, which stays
revoked once it was.
"""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from deployed import program

from kvstore.security.identities import add, new_token, read, revoke, token_hash, token_line

NODES = ("node:7442", "n1:7442", "n2:9000")


@pytest.fixture
def folders(tmp_path: Path) -> SimpleNamespace:
    folders = SimpleNamespace(
        **{name: tmp_path / name for name in ("secrets", "prometheus", "grafana")}
    )
    for folder in vars(folders).values():
        folder.mkdir()
    assert program("first_start").main([str(folders.secrets), "n1", "n2"]) == 0
    return folders


def run(folders: SimpleNamespace, *nodes: str) -> int:
    status: int = program("first_scrape").main(
        [*map(str, vars(folders).values()), *(nodes or NODES)]
    )
    return status


def scraped(folders: SimpleNamespace) -> list[str]:
    ((found),) = json.loads((folders.prometheus / "nodes.json").read_text())
    targets: list[str] = found["targets"]
    return targets


def test_prometheus_gets_a_token_to_read_all_tenants(folders: SimpleNamespace) -> None:
    assert run(folders) == 0
    token = (folders.prometheus / "prometheus.token").read_text().strip()
    found = read(folders.secrets / "identities")
    assert found.problems == []
    who = found.tokens[token_hash(token)]
    assert (who.name, who.tenant, who.role.name) == ("compose-prometheus", "*", "READ")
    for name in ("ca.pem", "client.key", "client.pem"):
        assert (folders.prometheus / name).read_bytes() == (folders.secrets / name).read_bytes()
    assert len((folders.grafana / "admin.password").read_text()) > 20


def test_hosts_outside_the_certificate_are_left_out(
    folders: SimpleNamespace,
) -> None:
    assert run(folders) == 0
    assert scraped(folders) == ["n1:7442", "n2:9000"]
    assert run(folders, "n1:7000") == 0
    assert scraped(folders) == ["n1:7000"]


def test_files_are_group_readable_and_split_by_container(folders: SimpleNamespace) -> None:
    assert run(folders) == 0
    for folder, names in {
        "prometheus": ["ca.pem", "client.key", "client.pem", "nodes.json", "prometheus.token"],
        "grafana": ["admin.password"],
    }.items():
        there = sorted(getattr(folders, folder).iterdir())
        assert [path.name for path in there] == names
        assert {stat.S_IMODE(path.stat().st_mode) for path in there} == {0o640}


def test_token_and_password_are_kept_and_a_revoked_token_stays_revoked(
    folders: SimpleNamespace,
) -> None:
    assert run(folders) == 0
    files = [
        folders.prometheus / "prometheus.token",
        folders.grafana / "admin.password",
        folders.secrets / "identities",
    ]
    before = [path.read_bytes() for path in files]
    assert run(folders) == 0
    assert [path.read_bytes() for path in files] == before
    assert revoke(folders.secrets / "identities", "compose-prometheus") == 1
    assert run(folders) == 0
    assert "compose-prometheus" not in {
        some.name for some in read(folders.secrets / "identities").tokens.values()
    }


def test_lost_token_is_replaced(folders: SimpleNamespace) -> None:
    """A token in no file is replaced, as after a killed run or a lost volume."""
    identities, lost = folders.secrets / "identities", new_token("*")
    add(identities, token_line("compose-prometheus", lost, tenant="*", role="read"))
    assert run(folders) == 0
    token = (folders.prometheus / "prometheus.token").read_text().strip()
    known = read(identities).tokens
    assert token_hash(token) in known
    assert token_hash(lost) not in known
    assert {some.name for some in known.values()} == {
        "operator",
        "member",
        "engine",
        "compose-prometheus",
    }


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (["n7:7442", "n8:7442"], "none of n7:7442, n8:7442; in KVSTORE_SCRAPED"),
        (["n1"], "n1 is not HOST:PORT"),
        (["n1:x"], "host:port"),
        ([""], "say which folders and nodes"),
    ],
)
def test_unscrapable_host_is_reported(
    folders: SimpleNamespace, capsys: pytest.CaptureFixture[str], nodes: list[str], message: str
) -> None:
    assert run(folders, *nodes) == 2
    assert message in capsys.readouterr().err
    assert list(folders.prometheus.iterdir()) == []


def test_missing_certificate_is_reported(
    folders: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders.secrets / "node.pem").unlink()
    assert run(folders) == 2
    assert "node.pem: No such file" in capsys.readouterr().err
