"""A member's data directory is restored from a backup, copied to another node, or wiped."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from fake_etcd import FakeEtcd
from fleet import present, wait_replicated
from fleets import Start, members, stop
from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from kvstore.errors import ConfigError, KVStoreError
from node.cluster.membership import FILE_NAME, REMOVALS_KEPT_S, Identity
from node.server import Node

DISK: dict[str, Any] = {
    "disk_nbytes": 16 << 20,
    "disk_extent_nbytes": 1 << 20,
    "scrub_nbytes_per_s": 0,
}
NUMBERS = range(20)


def there(node: Node, pages: Pages) -> int:
    return present(node, pages.namespace, pages.keys(*NUMBERS)).count(True)


def copied(folder: Path, to: Path) -> Path:
    """Copy `folder` to `to` as `cp -r` or an object store does, with new file dates.

    A running node replaces small files by hidden ones, which are gone a moment later.
    """
    ignore = shutil.ignore_patterns(".*")
    shutil.copytree(folder, to, copy_function=shutil.copyfile, ignore=ignore)
    return to


def test_restored_old_backup_is_refused_by_its_recorded_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    Identity(str(tmp_path / "old"), "fleet", "n1").save(7)
    copy = copied(tmp_path / "old", tmp_path / "copy")
    later = time.time() + REMOVALS_KEPT_S + 60
    os.utime(copy / FILE_NAME, (later, later))
    monkeypatch.setattr("time.time", lambda: later)
    with pytest.raises(ConfigError, match="away for 30 days, and removals are remembered for 30"):
        Identity(str(copy), "fleet", "n1")
    monkeypatch.undo()
    assert Identity(str(copy), "fleet", "n1").applied == 7


@pytest.mark.parametrize("has_grown", [False, True])
def test_removal_in_a_new_etcd_reaches_members_of_the_old(
    fleet: Start, etcd: FakeEtcd, connect: Connect, pages: Pages, tmp_path: Path, has_grown: bool
) -> None:
    """A new etcd numbers removals from the start again, below what a directory has applied."""
    two = fleet("n2", data_dir=str(tmp_path), **DISK)
    kept, other = Pages("kept"), Pages("other")
    alone = connect(two, direct=True)
    for some in (pages, kept):
        some.put(alone, some.keys(*NUMBERS))
    alone.flush()
    for _ in range(100):  # many more than the new etcd will have
        etcd.put("/kvstore/fleet/others", b"")
    for _ in range(3):
        other.put(alone, other.keys(1))
        alone.remove_namespace(other.namespace)
    wait_until(lambda: two.registry._identity.applied > 100)  # type: ignore[union-attr]
    stop(two)
    etcd.wipe()
    one = fleet("n1")
    client = connect(one)
    client.open(pages.namespace)
    client.remove_namespace(pages.namespace)
    wait_until(lambda: any("/removed/" in key for key in etcd.names()))
    applied = Identity(str(tmp_path), "fleet", "n2").applied
    assert etcd.revision <= applied
    if has_grown:
        for _ in range(applied):
            etcd.put("/kvstore/fleet/others", b"")
    two = fleet("n2", data_dir=str(tmp_path), **DISK)
    assert there(two, pages) == 0
    assert there(two, kept) == len(NUMBERS)
    third = Pages("third")
    third.put(connect(two, direct=True), third.keys(*NUMBERS))
    direct = connect(one, direct=True)
    direct.open(third.namespace)
    direct.remove_namespace(third.namespace)
    wait_until(lambda: there(two, third) == 0)


def test_backup_from_before_a_forget_restores_no_forgotten_page(
    fleet: Start, etcd: FakeEtcd, connect: Connect, tmp_path: Path
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    one = fleet("n1", replicas=2)
    two = fleet("n2", data_dir=str(data), **DISK)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    gone, kept = Pages("gone", tenant="gone"), Pages("kept", tenant="kept")
    client = connect(one, timeout_s=20.0)
    for pages in (gone, kept):
        pages.put(client, pages.keys(*NUMBERS))
    wait_replicated([one, two])
    connect(two, direct=True).flush()
    stop(two)
    copied(data, backup)
    two = fleet("n2", data_dir=str(data), **DISK)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    assert connect(one, timeout_s=20.0).forget("gone", 30.0).left == 0
    assert there(one, gone) == there(two, gone) == 0
    stop(two)
    shutil.rmtree(data)
    copied(backup, data)
    two = fleet("n2", data_dir=str(data), **DISK)
    assert there(two, gone) == 0
    assert there(two, kept) == len(NUMBERS)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_replicated([one, two])
    assert there(one, gone) == there(two, gone) == 0
    assert kept.get(connect(two, timeout_s=20.0), kept.keys(*NUMBERS)) == [True] * len(NUMBERS)


def test_copy_of_another_members_directory_restores_no_forgotten_page(
    fleet: Start, connect: Connect, tmp_path: Path
) -> None:
    """The copy is refused while it names its member; without its identity file it is cleared."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    one, two = fleet("n1"), fleet("n2", data_dir=str(data), **DISK)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    gone, kept = Pages("gone", tenant="gone"), Pages("kept", tenant="kept")
    at_two = connect(two, direct=True, timeout_s=20.0)
    for pages in (gone, kept):
        pages.put(at_two, pages.keys(*NUMBERS))
    at_two.flush()
    stop(two)
    copied(data, copy)
    two = fleet("n2", data_dir=str(data), **DISK)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    assert connect(one, timeout_s=20.0).forget("gone", 30.0).left == 0
    with pytest.raises(ConfigError, match="is that of n2; start it as n2"):
        fleet("n3", data_dir=str(copy), **DISK)
    (copy / FILE_NAME).unlink()
    three = fleet("n3", data_dir=str(copy), **DISK)
    assert there(three, gone) == 0
    assert there(three, kept) > 0
    wait_until(lambda: members(one) == members(two) == members(three) == ["n1", "n2", "n3"])
    wait_replicated([one, two, three])
    assert there(one, gone) == there(two, gone) == there(three, gone) == 0
    for node in (one, two, three):  # once each page is at its new owner
        client = connect(node, timeout_s=20.0)
        wait_until(lambda client=client: all(kept.get(client, kept.keys(*NUMBERS))))
    assert there(one, gone) == there(two, gone) == there(three, gone) == 0


def test_copy_of_a_directory_in_use_is_refused(fleet: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    one = fleet("n1", data_dir=str(data), **DISK)
    copied(data, tmp_path / "copy")
    with pytest.raises(
        ConfigError, match=rf"that of a copy of this data directory, at 127.0.0.1:{one.grpc.port}"
    ):
        fleet("n1", data_dir=str(tmp_path / "copy"), **DISK)
    assert one.peers.status().registry == "etcd"


def test_member_reports_a_copy_with_its_id_until_the_copy_stops(
    fleet: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy takes the id when it cannot reach the member and believes it dead."""
    data, message = tmp_path / "data", "is that of a copy of this data directory, at 127.0.0.1:{}"
    one = fleet("n1", data_dir=str(data), **DISK)
    copied(data, tmp_path / "copy")
    monkeypatch.setattr("node.cluster.registry.Registry._is_alive", lambda *_: False)
    twin = fleet("n1", data_dir=str(tmp_path / "copy"), **DISK)
    wait_until(lambda: message.format(twin.grpc.port) in one.peers.status().registry)
    assert twin.peers.status().registry == "etcd"
    stop(twin)
    wait_until(lambda: one.peers.status().registry == "etcd")

    def address() -> str | None:  # None until it has registered again
        view = one.membership.view
        member = view.by_id.get("n1") if view is not None else None
        return member.address if member is not None else None

    wait_until(lambda: address() == f"127.0.0.1:{one.grpc.port}")


@pytest.mark.parametrize(
    "what",
    [
        "all",
        "rows",
        *(pytest.param(what, marks=pytest.mark.long) for what in ("extents", "member.json")),
    ],
)
def test_directory_wiped_under_a_member_returns_no_wrong_bytes(
    fleet: Start, connect: Connect, tmp_path: Path, what: str
) -> None:
    data = tmp_path / "data"
    one = fleet("n1", replicas=2)
    settings = {**DISK, "data_dir": str(data), "ram_nbytes": 4 << 20}
    two = fleet("n2", **settings)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    client, pages = connect(one, timeout_s=20.0), Pages("wiped")
    some, more = pages.keys(*range(30)), pages.keys(*range(100, 130))
    pages.put(client, some)
    wait_replicated([one, two])
    for path in list(data.iterdir()) if what == "all" else [data / what]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    at_two = connect(two, direct=True, timeout_s=20.0)
    for _ in range(3):
        with contextlib.suppress(KVStoreError):
            pages.put(client, more)
        pages.get(at_two, some + more)  # compares each byte of each hit
        assert pages.get(client, some + more) == [True] * 60, "the other member has the pages"
    stop(two)
    two = fleet("n2", **settings)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    pages.get(connect(two, direct=True, timeout_s=20.0), some + more)
    wait_replicated([one, two])
    assert pages.get(client, some + more) == [True] * 60
