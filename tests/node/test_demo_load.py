"""The clients of `make demo-operate`, whose sums are the demo's verdict."""

from demo_load import Chats, requests  # type: ignore[import-not-found]

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import TraceRequest, trace_prefix_hash

NBYTES = 4096


def test_clients_count_hits_wrong_pages_and_errors(shared_node: NodeProcess) -> None:
    config = ClientConfig(address=shared_node.address, timeout_s=60.0, connect_timeout_s=30.0)
    with Client(config) as client:
        chats = Chats(client, NBYTES)
        client.put(chats.namespace, [trace_prefix_hash(1_000_001)], [b"wrong".ljust(NBYTES)])
        chats.run(TraceRequest(0.0, 1, 1, (1_000_000, 1_000_001)))
        assert (chats.sums.pages_hit, chats.sums.pages_asked) == (0, 2)
        chats.run(TraceRequest(0.0, 1, 1, (1_000_000, 1_000_001)))
        assert (chats.sums.pages_hit, chats.sums.pages_asked) == (2, 4)
        assert (chats.sums.pages_wrong, chats.sums.errors) == (1, 0)
    # A closed client raises from each call
    chats.run(next(requests(1)))
    assert (chats.sums.requests, chats.sums.errors, chats.sums.pages_hit) == (3, 2, 2)
    assert chats.sums.last_error
