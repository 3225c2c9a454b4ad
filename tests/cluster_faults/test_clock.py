"""The wall clock of a member jumps: no page is lost, and no time to live changes.

The clock of this machine stays as it is: the member's Python adds an offset that it reads from a
file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network_hosts import Hosts
from node_fleet import Fleet, Place

from kvstore.keys import Namespace
from kvstore.results import Keep
from kvstore.tools.replay import replay_namespace
from kvstore.tools.trace import page_content, trace_prefix_hash

WRONG_CLOCK = """
import pathlib, time
right, wrong = time.time, pathlib.Path({path!r})
time.time = lambda: right() + float(wrong.read_text() or 0)
"""
CALM_S = 2.0
DAY_S = 86400
KEYS = [trace_prefix_hash(number) for number in range(48)]


@pytest.mark.parametrize("jump_s", [2 * DAY_S, -2 * DAY_S])
def test_member_clock_jumps_keeps_pages(
    hosts: Hosts,
    flags: tuple[str, ...],
    load: Any,
    settled: Callable[[Fleet], None],
    namespace: Namespace,
    tmp_path: Path,
    jump_s: int,
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK.format(path=str(clock)))
    first, *others = hosts.places[:3]
    jumps = Place(first.host, (*first.inside, "env", f"PYTHONPATH={tmp_path}"))
    pages = [page_content(namespace.digest, key, namespace.layout.page_nbytes) for key in KEYS]
    passing = replay_namespace(namespace.layout.page_nbytes)
    with Fleet([jumps, *others], *flags, data=tmp_path / "data") as fleet:
        with fleet.client() as client:
            assert all(outcome.kept for outcome in client.put(namespace, KEYS, pages))
            assert all(
                outcome.kept for outcome in client.put(passing, KEYS, pages, Keep(ttl_s=DAY_S))
            )
        with load(fleet) as engines:
            engines.run(CALM_S)
            clock.write_text(str(jump_s))
            engines.run(2 * CALM_S)
        engines.check()
        with fleet.client() as client:
            buffers = [bytearray(len(page)) for page in pages]
            assert all(client.get(namespace, KEYS, buffers))
            assert buffers == pages
            assert all(client.lookup(passing, KEYS).present)
        settled(fleet)
