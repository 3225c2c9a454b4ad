"""Several ranks in processes of their own agree on the pages that all of them have."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import harness
import pytest
from ports import free_port

from kvstore.tools.node_process import NodeProcess

RANK = Path(__file__).parents[2] / "helpers" / "rank.py"
PAGES = 10


@pytest.fixture(scope="module")
def found(shared_node: NodeProcess) -> list[dict[str, Any]]:
    """Return the results of two ranks, by scenario."""
    config = harness.options(
        shared_node.address, lookup_timeout_s=10.0, load_timeout_s=10.0, save_timeout_s=10.0
    )
    job = json.dumps({"config": config, "revision": str(uuid.uuid4()), "port": free_port()})
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANK), str(rank), job],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], [errors[-3000:] for _, errors in outputs]
    return [json.loads(text.strip().splitlines()[-1]) for text, _ in outputs]


def test_ranks_use_pages_that_all_of_them_have(found: list[dict[str, Any]]) -> None:
    """Rank 1 loses page 7 before the query; rank 0 loses page 3 between query and read."""
    first, second = (rank["heads"] for rank in found)
    assert first["stored"] == second["stored"] == PAGES
    assert first["hit"] == second["hit"] == 7
    assert first["loaded"] == second["loaded"] == 3
    assert first["right"]
    assert second["right"]


def test_ranks_intersect_their_sets_of_lengths(found: list[dict[str, Any]]) -> None:
    """States end at {3, 6, 9} and {3, 6, 8}, so both ranks load their state after 6 pages."""
    first, second = (rank["states"] for rank in found)
    assert (first["restorable"], second["restorable"]) == ([3, 6, 9], [3, 6, 8])
    assert first["hit"] == second["hit"] == 6
    assert first["loaded"] == second["loaded"] == 1
    assert first["right"]
    assert second["right"]


def test_latents_are_written_by_one_rank_and_read_by_both(
    found: list[dict[str, Any]],
) -> None:
    first, second = (rank["latents"] for rank in found)
    assert (first["sets"], second["sets"]) == (1, 0)
    assert first["loaded"] == second["loaded"] == PAGES
    assert second["right"]
    assert first["after clear"] == second["after clear"] == 0
    assert first["stored again"] == second["stored again"] == PAGES
