"""R9: existence checks do not keep garbage alive: allocation succeeds while clients poll."""

import threading

from known_pages import Pages
from local_nodes import Connect, StartNode


def test_r09_polled_pages_are_evicted_in_order(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(start_node(ram_nbytes=64 << 10, extent_nbytes=64 << 10), wire)  # 16 pages
    garbage, wanted = chain.keys(*range(16)), chain.keys(*range(100, 116))
    chain.put(client, garbage)
    for position, key in enumerate(wanted):
        # The tail is evicted first
        assert client.lookup(chain.namespace, garbage).prefix_pages == 16 - position
        client.stat(chain.namespace, garbage)
        list(client.list_pages(chain.namespace))
        assert [outcome.name for outcome in chain.put(client, [key])] == ["STORED"]
    assert chain.get(client, wanted) == [True] * 16


def test_r09_every_put_succeeds_while_many_clients_poll(
    start_node: StartNode, connect: Connect, chain: Pages
) -> None:
    node = start_node(ram_nbytes=64 << 10, extent_nbytes=64 << 10)
    writer, poller = connect(node), connect(node)
    stop = threading.Event()
    polls = [0] * 4

    def poll(number: int) -> None:
        while not stop.is_set():
            poller.lookup(chain.namespace, chain.keys(*range(160)))
            polls[number] += 1

    threads = [threading.Thread(target=poll, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(160):
            assert [outcome.name for outcome in chain.put(writer, chain.keys(number))] == ["STORED"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(polls)
    assert chain.get(writer, chain.keys(*range(144, 160))) == [True] * 16
