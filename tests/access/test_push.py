"""Replacement of the identities file over the network, and the commands about tenants."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_runner import Ran, run_kvstore
from local_nodes import StartNode
from people import PAGE_NBYTES, People, client, namespace

from kvstore import Client, ConfigError, Forbidden, InvalidRequest
from kvstore.cluster.view import Member, View
from kvstore.security.identities import ALL, Principal, Role, read, revoke, token_line
from kvstore.security.identities import replace as replace_file
from node.auth.access import Access
from node.config import NodeConfig
from node.server import Node


class Crew(NamedTuple):
    """Two members with a file of identities each, and the file to push."""

    nodes: list[Node]
    files: list[Path]
    people: People
    token: Path

    def run(self, *arguments: str) -> Ran:
        address = f"127.0.0.1:{self.nodes[0].grpc.port}"
        return run_kvstore(*arguments, "-a", address, "--token-file", str(self.token))

    def same(self) -> bool:
        return self.files[0].read_bytes() == self.files[1].read_bytes()


@pytest.fixture(scope="module")
def crew(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    people = People(folder / "pushed")
    people.join("operator", ALL, "admin")
    people.join("member", ALL, "node")
    people.join("engine", "team-a", "write")
    token = folder / "token"
    token.write_text(people.tokens["operator"])
    token.chmod(0o600)
    files, nodes = [folder / "n0", folder / "n1"], []
    for file in files:
        file.write_bytes(people.path.read_bytes())
        file.chmod(0o640)
        nodes.append(start_node(identities=str(file), identities_writable=True))
    members = tuple(Member(f"n{i}", f"127.0.0.1:{node.grpc.port}") for i, node in enumerate(nodes))
    for number, node in enumerate(nodes):
        node.membership.become(View("fleet", 1, members), f"n{number}")
    yield Crew(nodes, files, people, token)
    for number, node in enumerate(nodes):
        node.membership.become(View("fleet", 9, members[number : number + 1]), f"n{number}")


@pytest.fixture
def operator(crew: Crew) -> Iterator[Client]:
    with client(crew.nodes[0], crew.people.tokens["operator"], direct=True) as operator:
        yield operator


def test_push_reaches_every_member_and_is_in_force_at_once(crew: Crew) -> None:
    crew.people.join("late", "team-b", "read")
    tried = crew.run("identities", "push", str(crew.people.path), "--dry-run", "--json")
    assert [member["added"] for member in tried.json["members"]] == [["late"], ["late"]]
    assert "late" not in crew.files[0].read_text()
    done = crew.run("identities", "push", str(crew.people.path), "--json")
    assert (done.code, done.json["away"]) == (0, [])
    for node, file in zip(crew.nodes, crew.files, strict=True):
        assert file.read_bytes() == crew.people.path.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o640
        assert node.access.of_token(crew.people.tokens["late"]).tenant == "team-b"
        assert done.json["members"][0]["digest"] == node.access.identities.digest.hex()


def test_cluster_shows_members_whose_file_differs(crew: Crew) -> None:
    run = crew.run("cluster")
    assert "identities differ" not in run.stderr
    assert run.stdout.count(crew.nodes[0].access.identities.digest.hex()[:12]) == 2
    with crew.files[1].open("a") as file:
        file.write("# another file\n")
    crew.nodes[1].access.poll()
    run = crew.run("cluster")
    digests = [node.access.identities.digest.hex()[:12] for node in crew.nodes]
    assert f"identities differ: {digests[0]} at n0; {digests[1]} at n1" in run.stderr
    assert crew.run("identities", "push", str(crew.people.path)).code == 0
    assert crew.same()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("operator", "operator would no longer administer this node"),
        ("member", "without member, of role node, members could not reach each other"),
    ],
)
def test_push_that_takes_needed_rights_is_refused_everywhere(
    crew: Crew, tmp_path: Path, lost: str, message: str
) -> None:
    kept = [line for line in crew.people.path.read_text().splitlines() if f" {lost} " not in line]
    file = tmp_path / "less"
    file.write_text("\n".join(kept) + "\n")
    before = crew.files[0].read_bytes()
    refused = crew.run("identities", "push", str(file))
    assert (refused.code, message in refused.stderr) == (2, True), refused.stderr
    assert crew.same()
    assert crew.files[0].read_bytes() == before
    if lost == "member":
        assert crew.run("identities", "push", str(file), "--force").code == 0
        assert crew.run("identities", "push", str(crew.people.path)).code == 0


def test_refusal_by_one_member_leaves_all_unchanged(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew.nodes[1].access, "writable", False)
    crew.people.join("never", "team-b", "read")
    refused = crew.run("identities", "push", str(crew.people.path))
    crew.people.leave("never")
    assert refused.code == 2
    assert "n1: this node's identities are changed on its host only" in refused.stderr
    assert "no member is changed" in refused.stderr
    assert "never" not in crew.files[0].read_text()


def test_same_name_with_another_token_is_a_lockout(operator: Client, crew: Crew) -> None:
    """The caller must keep its own credential, not only its name."""
    lines = crew.people.path.read_text().replace(
        read_line(crew.people.path, "operator"),
        token_line("operator", "x" * 43, tenant=ALL, role="admin"),
    )
    with pytest.raises(InvalidRequest, match="with the same credential"):
        operator.push_identities(lines.encode())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("operator", "\n", " expires=2001-01-01T00:00:00Z\n", "with the same credential"),
        ("operator", "role=admin", "role=write", "with the same credential"),
        ("member", "role=node", "role=write", "without member, of role node"),
    ],
)
def test_credential_that_loses_its_right_is_a_lockout(
    operator: Client, crew: Crew, name: str, old: str, new: str, message: str
) -> None:
    line = read_line(crew.people.path, name) + "\n"
    text = crew.people.path.read_text().replace(line, line.replace(old, new))
    with pytest.raises(InvalidRequest, match=message):
        operator.push_identities(text.encode())


def read_line(path: Path, name: str) -> str:
    (line,) = [line for line in path.read_text().splitlines() if line.split()[1:2] == [name]]
    return line


@pytest.mark.parametrize("content", [b"", b"token x\n", b"tenant a ram=much\n", b"# nobody\n"])
def test_invalid_content_changes_nothing(operator: Client, crew: Crew, content: bytes) -> None:
    before = crew.files[0].read_bytes()
    with pytest.raises(InvalidRequest, match="is not valid"):
        operator.push_identities(content, force=True)
    if content.startswith(b"t"):  # one bad line among good ones
        with pytest.raises(InvalidRequest, match="is not valid"):
            operator.push_identities(before + content, force=True)
    with pytest.raises(InvalidRequest, match="is not valid"):  # a file that was cut off
        operator.push_identities(before.rstrip(b"\n"), force=True)
    assert crew.files[0].read_bytes() == before


def test_only_administrators_of_all_tenants_push(crew: Crew) -> None:
    content = crew.people.path.read_bytes()
    for name in ("engine", "member"):
        with (
            client(crew.nodes[0], crew.people.tokens[name], direct=True) as caller,
            pytest.raises(Forbidden),
        ):
            caller.push_identities(content)


def test_node_takes_no_file_unless_it_is_started_so(node: Node, people: People) -> None:
    with (
        client(node, people.tokens["operator"]) as operator,
        pytest.raises(InvalidRequest, match="start it with --identities-writable"),
    ):
        operator.push_identities(people.path.read_bytes())
    with pytest.raises(ConfigError, match="set identities, too"):
        NodeConfig(identities_writable=True)
    with pytest.raises(ConfigError, match="identities_writable needs TLS"):
        NodeConfig(identities_writable=True, identities="x", host="0.0.0.0", insecure=True)


def test_file_that_can_not_be_written_is_named(
    operator: Client, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("kvstore.security.identities.write_whole", full)
    with pytest.raises(InvalidRequest, match="n0 can not be written: No space left on device"):
        operator.push_identities(crew.people.path.read_bytes())


OPERATOR = Principal("operator", ALL, Role.ADMIN)


def written(path: Path, member: str = "tenant=* role=node") -> Access:
    """Return the access of a node whose file has an operator and a member."""
    path.write_text(f"{token_line('operator', 'o', tenant=ALL, role='admin')}\n{of_member(member)}")
    path.chmod(0o640)
    return Access(str(path), writable=True)


def of_member(fields: str) -> str:
    return (
        f"{token_line('member', 'm', tenant=ALL, role='node').partition(' tenant')[0]} {fields}\n"
    )


@pytest.mark.parametrize(
    "fields",
    [
        "tenant=* role=node expires=2020-01-01T00:00:00Z",
        "tenant=team-a role=admin",
        "tenant=* role=admin models=llama-*",
    ],
)
def test_push_that_leaves_a_member_without_its_rights_is_refused(
    tmp_path: Path, fields: str
) -> None:
    access = written(tmp_path / "identities")
    content = access_text(tmp_path).replace(of_member("tenant=* role=node"), of_member(fields))
    with pytest.raises(InvalidRequest, match="without member, of role node"):
        access.push(content.encode(), OPERATOR)
    expired = written(tmp_path / "identities", "tenant=* role=node expires=2020-01-01T00:00:00Z")
    kept = access_text(tmp_path).splitlines(keepends=True)[0]
    assert expired.push(kept.encode(), OPERATOR)[2] == {"member"}  # it had no rights any more


def access_text(folder: Path) -> str:
    return (folder / "identities").read_text()


def test_check_refuses_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    """The check fails before any member writes."""
    file = tmp_path / ("i" * 250)  # no name is left for the new file beside it
    access = written(file)
    with pytest.raises(ConfigError, match="can not be written: File name too long"):
        access.push(file.read_bytes(), OPERATOR, check=True)


def test_revocation_during_a_push_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = written(tmp_path / "identities")

    def then_revoked(path: Path, content: bytes, lock_s: float) -> None:
        replace_file(path, content, lock_s)
        revoke(path, "member")

    monkeypatch.setattr("node.auth.access.replace", then_revoked)
    access.push(f"{access_text(tmp_path)}# new\n".encode(), OPERATOR)
    access.poll()
    assert access.identities.names == {"operator"}


def test_push_does_not_wait_for_ever_for_a_locked_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user who may read a directory can lock it, and polls wait for a push."""
    access = written(tmp_path / "identities")
    monkeypatch.setattr("node.auth.access.LOCK_S", 0.05)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has locked its directory"):
            access.push(access_text(tmp_path).encode(), OPERATOR)
    finally:
        os.close(directory)
    access.push(access_text(tmp_path).encode(), OPERATOR)


def test_quota_of_the_file_is_pushed_and_listed(crew: Crew) -> None:
    with client(crew.nodes[0], crew.people.tokens["engine"], direct=True) as engine:
        engine.put(namespace(), [b"k" * 32], [bytes(PAGE_NBYTES)])
    file = str(crew.people.path)
    set_ = run_kvstore("tenants", "quota", "team-a", "--ram", "64MiB", "--pins", "9", "-f", file)
    assert "team-a has the quota ram=64MiB pins=9" in set_.stdout
    changed = run_kvstore(
        *("tenants", "quota", "team-a", "--pins", "0", "--disk", "1GiB", "-f", file, "--json")
    )
    assert changed.json["quota"] == {"ram": "64MiB", "disk": "1GiB"} | {
        "ram_nbytes": 64 << 20,
        "disk_nbytes": 1 << 30,
    }
    assert crew.run("identities", "push", file).code == 0
    ran = crew.run("tenants", "list", "--json")
    (team,) = [use for use in ran.json["tenants"] if use["tenant"] == "team-a"]
    assert (team["ram_quota_nbytes"], team["ram_pages"], ran.json["nodes"]) == (128 << 20, 1, 2)
    assert team["ram_share"] == 1.0
    assert "team-a" in crew.run("tenants", "list").stdout
    assert run_kvstore("tenants", "quota", "team-a", "--none", "-f", file).code == 0
    assert read(crew.people.path).quotas == {}


def test_quota_that_no_node_would_take_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "identities"
    file.write_text("tenant team-a ram=1GiB  # agreed in May\n")
    for arguments, message in (
        (["team-a"], "give --ram, --disk, --held or --pins"),
        (["team-a", "--ram", "much"], "--ram 'much' is not a size"),
        (["team a", "--ram", "1GiB"], "a tenant's name is"),
    ):
        ran = run_kvstore("tenants", "quota", *arguments, "-f", str(file))
        assert (ran.code, message in ran.stderr) == (2, True), ran.stderr
    run_kvstore("tenants", "quota", "team-a", "--disk", "2GiB", "-f", str(file))
    assert file.read_text() == "tenant team-a ram=1GiB disk=2GiB # agreed in May\n"
    file.write_text("tenant team-a#none yet\ntenant team-a ram=9GiB\n")
    run_kvstore("tenants", "quota", "team-a", "--ram", "1GiB", "-f", str(file))
    assert file.read_text() == "tenant team-a ram=1GiB #none yet\n"
    assert read(file).quotas == {"team-a": {"ram": "1GiB"}}
