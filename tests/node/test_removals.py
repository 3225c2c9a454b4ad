"""Removals of namespaces in a cluster run once at every member, also at one that was away."""

from pathlib import Path
from typing import Any, cast

import pytest
from fake_etcd import FakeEtcd
from fleets import Start, stop, value
from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from kvstore.errors import ConfigError
from node.cluster.etcd import Entry, KeysAtRevision
from node.cluster.membership import REMOVALS_KEPT_S, Identity
from node.cluster.registry_state import NamespaceTombstones, RegistryState, Removal, parse_removed

DISK = {"disk_nbytes": 64 << 20}
KEYS = range(20)


def present(client: Any, pages: Pages) -> int:
    return client.lookup(pages.namespace, pages.keys(*KEYS)).present.count(True)


def test_absent_member_removes_before_it_serves(
    fleet: Start,
    connect: Connect,
    pages: Pages,
    tmp_path: Path,
) -> None:
    two = fleet("n2", data_dir=str(tmp_path), **DISK)  # owns all pages, so that all go to its disk
    kept = Pages("kept")
    alone = connect(two, direct=True)
    for some in (pages, kept):
        some.put(alone, some.keys(*KEYS))
    alone.flush()
    one = fleet("n1")
    stop(two)
    wait_until(lambda: len(one.membership.view.members) == 1)  # type: ignore[union-attr]
    client = connect(one)
    client.open(pages.namespace)
    client.remove_namespace(pages.namespace)
    again = connect(fleet("n2", data_dir=str(tmp_path), **DISK), direct=True)
    assert present(again, pages) == 0
    assert present(again, kept) == len(KEYS), "other namespaces must stay"
    pages.put(again, pages.keys(*KEYS))
    again.flush()
    stop(fleet("n3"))
    assert present(again, pages) == len(KEYS)


def test_page_put_after_a_removal_stays(
    fleet: Start, etcd: FakeEtcd, connect: Connect, pages: Pages
) -> None:
    """Members receive a removal once more, from etcd, after the call has ended."""
    nodes = [fleet(f"n{i}") for i in range(3)]
    wait_until(lambda: all(len(node.membership.view.members) == 3 for node in nodes))  # type: ignore[union-attr]
    client, etcd.late_s = connect(nodes[0]), 0.3
    for _ in range(3):
        pages.put(client, pages.keys(*KEYS))
        client.remove_namespace(pages.namespace)
        assert present(client, pages) == 0
        pages.put(client, pages.keys(*KEYS))
        assert len(value(etcd, f"removed/{pages.namespace.digest.hex()}")["removal"]) == 32
        number = etcd.kvs[
            f"/kvstore/fleet/removed/{pages.namespace.digest.hex()}".encode()
        ].mod_revision
        for node in nodes:  # until each member has applied it
            wait_until(lambda node=node, number=number: node.registry._identity.applied >= number)
        assert present(client, pages) == len(KEYS)
    assert len([key for key in etcd.names() if "/removed/" in key]) == 1


def test_removal_reaches_members_through_etcd(fleet: Start, connect: Connect, pages: Pages) -> None:
    one, two = fleet("n1"), fleet("n2")
    alone = connect(two, direct=True)
    pages.put(alone, pages.keys(*KEYS))
    other = connect(one, direct=True)
    other.open(pages.namespace)
    other.remove_namespace(pages.namespace)
    wait_until(lambda: present(alone, pages) == 0)


def test_removal_during_an_etcd_outage_is_announced_later(
    fleet: Start,
    etcd: FakeEtcd,
    connect: Connect,
    pages: Pages,
) -> None:
    one = fleet("n1")
    client = connect(one)
    pages.put(client, pages.keys(*KEYS))
    etcd.stop()
    client.remove_namespace(pages.namespace)
    etcd.start()
    wait_until(lambda: any("/removed/" in key for key in etcd.names()))


@pytest.mark.parametrize("later_writes", [20, 300])
@pytest.mark.parametrize("away", [False, True])
def test_removal_after_etcd_lost_its_data_reaches_all_members(
    fleet: Start,
    etcd: FakeEtcd,
    connect: Connect,
    pages: Pages,
    tmp_path: Path,
    away: bool,
    later_writes: int,
) -> None:
    """A removal that waited for etcd is written at once, perhaps before the numbers were raised.

    With many later writes, such as of others, they need not be.
    """
    one, two = fleet("n1"), fleet("n2", data_dir=str(tmp_path), **DISK)
    alone = connect(two, direct=True)
    pages.put(alone, pages.keys(*KEYS))
    alone.flush()
    for _ in range(100):
        etcd.put("/kvstore/fleet/others", b"")
    asked, former = connect(one, direct=True), Pages("former").namespace
    asked.open(former)
    asked.remove_namespace(former)  # the newest known removal, numbered as the view
    key = f"/kvstore/fleet/removed/{former.digest.hex()}"
    wait_until(lambda: etcd.has(key))
    newest = etcd.kvs[key.encode()].mod_revision
    for node in (one, two):
        wait_until(lambda node=node: node.registry._identity.applied >= newest)
    if away:
        stop(two)
    etcd.stop()
    etcd.wipe()
    etcd.put("/kvstore/fleet/config", b'{"replicas": 1, "base": 0, "id": "new"}')
    etcd.put(
        f"/kvstore/fleet/removed/{pages.namespace.digest.hex()}",
        b'{"removal": "%s", "by": "n1"}' % (b"07" * 16),
    )
    for _ in range(later_writes):
        etcd.put("/kvstore/fleet/others", b"")  # written before the numbers rise
    rises = etcd.revision < newest
    etcd.start()
    wait_until(lambda: (value(etcd, "config")["base"] > 0) == rises)
    if away:
        two = fleet("n2", data_dir=str(tmp_path), **DISK)
        alone = connect(two, direct=True)
    wait_until(lambda: present(alone, pages) == 0)


def test_data_directory_keeps_the_identity_of_its_node(tmp_path: Path) -> None:
    first = Identity(str(tmp_path), "fleet", "")
    first.save(7)
    again = Identity(str(tmp_path), "fleet", "")
    assert (again.member, again.token, again.applied) == (first.member, first.token, 7)
    assert Identity(str(tmp_path), "fleet", first.member).member == first.member
    with pytest.raises(
        ConfigError, match=rf"is that of {first.member}; start it as {first.member}"
    ):
        Identity(str(tmp_path), "fleet", "other")
    with pytest.raises(ConfigError, match="belongs to a member of the cluster fleet, not of other"):
        Identity(str(tmp_path), "other", "")
    with pytest.raises(ConfigError, match=r"set it with member \(--member\)"):
        Identity("", "fleet", "")


def test_node_away_too_long_does_not_restore_removed_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Identity(str(tmp_path), "fleet", "").save(7)
    later = (tmp_path / "member.json").stat().st_mtime + REMOVALS_KEPT_S + 60
    monkeypatch.setattr("time.time", lambda: later)
    with pytest.raises(ConfigError, match="away for 30 days, and removals are remembered for 30"):
        Identity(str(tmp_path), "fleet", "")


def test_member_whose_clock_was_set_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age is unknown: it may have been away for months."""
    Identity(str(tmp_path), "fleet", "").save(7)
    earlier = (tmp_path / "member.json").stat().st_mtime - 2 * 86400
    monkeypatch.setattr("time.time", lambda: earlier)
    with pytest.raises(ConfigError, match=r"is dated 2\.0 days in the future .*correct the clock"):
        Identity(str(tmp_path), "fleet", "")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"applied": "x"}', '{"to_erase": "x"}', '{"to_erase": [1]}']
)
def test_damaged_identity_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "member.json").write_text(text)
    with pytest.raises(ConfigError, match=r"member.json can not be read: .*; remove it"):
        Identity(str(tmp_path), "fleet", "")


def test_erase_runs_once_at_each_member(
    tmp_path: Path,
) -> None:
    """An erasure runs at once also for unknown namespaces, as they may have new pages by the time
    etcd reports it.
    """
    removed: list[bytes] = []
    erased: list[list[bytes]] = []
    removals = NamespaceTombstones(
        Identity(str(tmp_path), "fleet", ""), removed.append, lambda: None, erased.append
    )
    removals.begin_erasure(b"asked")
    one, two, three = (bytes([number]) * 16 for number in range(3))
    received = [
        Removal(one, b"1", 1, b"asked"),
        Removal(two, b"2", 2, b"not asked"),
        Removal(three, b"3", 3),
    ]
    removals.receive(lambda _: received, 3, "")
    unused: Any = None
    removals.work(unused, unused)
    removals.work(unused, unused)
    assert removed == [two, three]
    assert erased == [[two]]


@pytest.mark.parametrize("at_a_start", [False, True])
def test_node_stopped_before_an_erasure_runs_it_after_its_restart(
    tmp_path: Path, at_a_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal is already recorded as applied, so etcd does not report it again."""
    monkeypatch.setattr("node.cluster.registry_state.TOUCH_S", 0.1)
    digest, unused = bytes(range(16)), cast(Any, None)

    def dies(digests: list[bytes]) -> None:
        raise SystemExit

    first = NamespaceTombstones(
        Identity(str(tmp_path), "fleet", ""), lambda digest: None, lambda: None, dies
    )
    received = [Removal(digest, b"1", 1, b"tenant")]
    if at_a_start:
        first.catch_up(received, 1)
    else:
        first.receive(lambda _: received, 1, "")
        first.work(unused, unused)
    with pytest.raises(SystemExit):
        first.work(unused, unused)
    erased: list[list[bytes]] = []
    second = NamespaceTombstones(
        Identity(str(tmp_path), "fleet", ""), lambda digest: None, lambda: None, erased.append
    )
    second.catch_up(received, 1)
    second.work(unused, unused)
    assert erased == [[digest]]
    assert Identity(str(tmp_path), "fleet", "").to_erase == []


def test_join_reads_removals_in_several_answers(
    fleet: Start, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.cluster.etcd.KEYS_MAX", 3)
    etcd.keys_max = 3
    removed = [bytes([number]) * 16 for number in range(10)]
    for digest in removed:
        etcd.put(
            f"/kvstore/fleet/removed/{digest.hex()}", b'{"removal": "%s"}' % digest.hex().encode()
        )
    node = fleet("n1")
    assert node.registry is not None
    assert {some.digest for some in node.registry._registry_state.removals()} == set(removed)


def test_old_removals_are_not_applied_again() -> None:
    """Otherwise each change in etcd would cost all removals of 30 days, at all members."""
    registry_state = RegistryState("fleet")
    written = {
        registry_state.removed_key(bytes([n])): Entry(b'{"removal": "%02x"}' % n, n, 0)
        for n in range(9)
    }
    registry_state.reset(
        KeysAtRevision(
            9, {registry_state.config_key: Entry(b'{"replicas": 1, "base": 100}', 1, 0)} | written
        )
    )
    assert [some.number for some in registry_state.removals()] == list(range(100, 109))
    parse_removed.cache_clear()
    assert [some.number for some in registry_state.removals(106)] == [107, 108]
    assert parse_removed.cache_info().misses == 2
