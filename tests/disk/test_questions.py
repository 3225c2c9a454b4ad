"""Questions to an I/O process, such as a list of pages, while its disk hangs."""

import pytest
from disk_nodes import Pages
from planted import Fault
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.errors import Exhausted
from node.disk.io_process import QUESTION_S
from node.server import Node


def test_list_on_a_hanging_disk_ends_before_the_client_deadline(
    kept: Node, fault: Fault, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list on a hanging disk ends with the node's error, before the client's deadline.

    A deadline would open the client's circuit breaker, as if the node hung.
    """
    assert ClientConfig().timeout_s >= QUESTION_S + 1.0
    monkeypatch.setattr("node.disk.io_process.QUESTION_S", 1.0)
    with Client(
        ClientConfig(address=f"127.0.0.1:{kept.grpc.port}", wire="bulk", timeout_s=20.0)
    ) as client:
        pages.put(client, pages.keys(1), durable=True)
        fault.plant("scan", "hang")
        with pytest.raises(Exhausted, match="the disk has not answered for 1 s; try again later"):
            list(client.list_pages(pages.namespace))
        wait_until(fault.hangs)
        assert pages.get(client, pages.keys(1)) == [True]
        fault.clear()
        wait_until(lambda: not kept.disk or not kept.disk.stop_reason)
        assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == pages.keys(1)
