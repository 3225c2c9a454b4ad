"""A member is killed, paused, cut off or restarted, or its disk fails, while engines run."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network_hosts import Hosts
from node_fleet import Fleet

from kvstore.keys import Namespace
from kvstore.results import Keep
from kvstore.tools.trace import page_content, trace_prefix_hash

CALM_S = 2.0
FAULT_S = 5.0
KEYS = [trace_prefix_hash(number) for number in range(96)]


@pytest.fixture(params=[1, 2])
def fleet(
    request: pytest.FixtureRequest, hosts: Hosts, flags: tuple[str, ...], tmp_path: Path
) -> Any:
    with Fleet(hosts.places[:3], *flags, replicas=request.param, data=tmp_path) as started:
        yield started


def fill(fleet: Fleet, namespace: Namespace) -> None:
    nbytes = namespace.layout.page_nbytes
    with fleet.client() as client:
        pages = [page_content(namespace.digest, key, nbytes) for key in KEYS]
        assert all(outcome.kept for outcome in client.put(namespace, KEYS, pages, Keep(ack="all")))
        client.flush()


def found(fleet: Fleet, namespace: Namespace, timeout_s: float = 5.0) -> int:
    """Return how many of the pages are found, after comparing the bytes of each one."""
    nbytes = namespace.layout.page_nbytes
    buffers = [bytearray(nbytes) for _ in KEYS]
    with fleet.client(timeout_s=timeout_s, connect_timeout_s=timeout_s) as client:
        hits = client.get(namespace, KEYS, buffers)
    for key, hit, buffer in zip(KEYS, hits, buffers, strict=True):
        assert not hit or buffer == page_content(namespace.digest, key, nbytes)
    return sum(hits)


def without_one(fleet: Fleet) -> range:
    """Return the range of page counts that may be found while one member is away."""
    return range(len(KEYS), len(KEYS) + 1) if fleet.replicas > 1 else range(1, len(KEYS))


def test_killed_member_comes_back_with_its_pages(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    fill(fleet, namespace)
    with load(fleet) as engines:
        engines.run(CALM_S)
        fleet.nodes["n1"].kill()
        engines.run(FAULT_S)
        assert found(fleet, namespace) in without_one(fleet)
        fleet.start("n1")
        engines.run(CALM_S)
    engines.check()
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)


def test_paused_member_keeps_its_pages(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    fill(fleet, namespace)
    with load(fleet) as engines:
        engines.run(CALM_S)
        fleet.nodes["n2"].pause()
        engines.run(FAULT_S)
        fleet.nodes["n2"].resume()
        engines.run(CALM_S)
    engines.check()
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)


@pytest.mark.parametrize(("hears", "speaks"), [(False, False), (True, False), (False, True)])
def test_member_cut_off_keeps_its_pages(
    fleet: Fleet,
    hosts: Hosts,
    load: Any,
    settled: Callable[[Fleet], None],
    namespace: Namespace,
    hears: bool,
    speaks: bool,
) -> None:
    fill(fleet, namespace)
    with load(fleet) as engines:
        engines.run(CALM_S)
        hosts.cut(hosts.places[2], hears=hears, speaks=speaks)
        engines.run(FAULT_S)
        assert found(fleet, namespace, timeout_s=2.0) in without_one(fleet)
        hosts.heal(hosts.places[2])
        engines.run(CALM_S)
    engines.check()
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)


def test_member_cut_off_from_members_serves_clients(
    fleet: Fleet, hosts: Hosts, load: Any, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    fill(fleet, namespace)
    alone, *others = hosts.places[:3]
    with load(fleet) as engines:
        engines.run(CALM_S)
        hosts.cut(alone, *(place.host for place in others))
        engines.run(FAULT_S)
        assert found(fleet, namespace) == len(KEYS)
        hosts.heal(alone)
        engines.run(CALM_S)
    engines.check()
    settled(fleet)


def test_slow_disk_causes_no_errors(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    """Calls stay correct while n1's disk I/O process is stopped for nine tenths of the time."""
    fill(fleet, namespace)
    io_process = subprocess.run(
        ["pgrep", "--parent", str(fleet.nodes["n1"].pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    with load(fleet) as engines:
        end = time.monotonic() + FAULT_S
        while time.monotonic() < end:
            subprocess.run(["kill", "-STOP", *io_process], check=True)
            time.sleep(0.9)
            subprocess.run(["kill", "-CONT", *io_process], check=True)
            time.sleep(0.1)
    engines.check()
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)


def test_full_disk_is_limited_without_errors(
    hosts: Hosts,
    flags: tuple[str, ...],
    load: Any,
    settled: Callable[[Fleet], None],
    tmp_path: Path,
) -> None:
    """The disk of n1 goes on when its file system of 24 MiB has no space for more."""
    small = tmp_path / "n1"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "kvstore", small], check=True)
    try:
        with Fleet(hosts.places[:3], *flags, data=tmp_path) as fleet:
            with load(fleet) as engines:
                engines.run(2 * FAULT_S)
            engines.check()
            with fleet.client() as client:
                disks = [answer.disk for answer in client.statuses().values()]
            assert {disk.state for disk in disks} == {"SERVING"}
            assert [bool(disk.limit) for disk in disks].count(True) == 1
            settled(fleet)
    finally:
        subprocess.run(["umount", small], check=True)


def test_rolling_restart_keeps_pages(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    fill(fleet, namespace)
    with load(fleet) as engines:
        for member in list(fleet.nodes):
            engines.run(CALM_S)
            assert fleet.nodes[member].stop() == 0
            fleet.start(member)
        engines.run(CALM_S)
    engines.check()
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)


def test_all_members_killed_at_once_come_back(
    fleet: Fleet, settled: Callable[[Fleet], None], namespace: Namespace
) -> None:
    fill(fleet, namespace)
    for node in fleet.nodes.values():
        node.kill()
    for member in list(fleet.nodes):
        fleet.start(member)
    assert found(fleet, namespace) == len(KEYS)
    settled(fleet)
