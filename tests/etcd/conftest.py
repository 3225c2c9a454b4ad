"""Fixtures for nodes that register with a real etcd process."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import small_nodes
from local_nodes import StartNode
from real_etcd import LEASE_S, RealEtcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    etcd = RealEtcd(tmp_path / "etcd")
    yield etcd
    etcd.process.send_signal(signal.SIGCONT)
    etcd.kill()


@pytest.fixture
def fleet(etcd: RealEtcd) -> Iterator[StartNode]:
    """Return a function that starts members of the cluster `fleet`."""
    known = {"cluster": f"etcd://{etcd.endpoint}/fleet", "lease_s": LEASE_S}
    with small_nodes() as start:
        yield lambda member, **settings: start(**{**known, "member": member, **settings})
