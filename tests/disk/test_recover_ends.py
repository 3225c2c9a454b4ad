"""After a recover, its time limit is gone, and pages that no sync covered are dropped."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from disk_nodes import Pages
from planted import Fault, io_process_of
from waiting import wait_until

from kvstore import Client, ClientConfig, PutOutcome
from node.disk.io_process import RECOVER_S
from node.server import Node


@pytest.fixture
def client(kept: Node) -> Iterator[Client]:
    with Client(
        ClientConfig(address=f"127.0.0.1:{kept.grpc.port}", wire="bulk", timeout_s=20.0)
    ) as client:
        yield client


def test_time_limit_of_a_recover_ends_with_it(
    kept: Node, client: Client, fault: Fault, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: half a minute after a recover, each slow write counted as hanging and stopped the
    tier.
    """
    assert kept.disk is not None
    pages.put(client, pages.keys(1), durable=True)
    os.kill(io_process_of(kept), signal.SIGKILL)
    wait_until(lambda: bool(kept.disk and kept.disk.stop_reason))
    client.recover()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + RECOVER_S + 1.0)
    monkeypatch.setattr("node.disk.io_process.time", later)
    fault.plant("sync pages", "300000")  # a slow disk is not a broken one
    assert pages.put(client, pages.keys(2), durable=True) == [PutOutcome.STORED]
    assert not kept.disk.stop_reason


def test_unsynced_pages_of_an_ended_io_process_are_dropped(
    kept: Node, client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: unsynced pages of an ended I/O process counted as safe.

    A new I/O process can not sync the writes of the old one.
    """
    disk = kept.disk
    assert disk is not None
    with monkeypatch.context() as patch:
        # No more idle syncs after the writer's next wait
        patch.setattr("node.disk.writer.IDLE_S", 60.0)
        pages.put(client, pages.keys(1), durable=True)
        pages.put(client, pages.keys(2))
        wait_until(lambda: disk.present(pages.digest, pages.keys(2)) == [True])
        assert disk.safe(pages.digest, pages.keys(1, 2)) == [True, False]
        os.kill(io_process_of(kept), signal.SIGKILL)
        wait_until(lambda: bool(disk.directory.trouble()))
        client.recover()
        assert disk.present(pages.digest, pages.keys(1, 2)) == [True, False]
