"""`kvstore feed`, for people and as JSON."""

import json

from cli_runner import Kvstore

from kvstore import Namespace
from kvstore.keys import block_part


def test_feed_shows_a_snapshot(kvstore: Kvstore, space: Namespace, hashes: list[bytes]) -> None:
    shown = kvstore("feed", "--model", space.model, "--snapshot")
    assert shown.code == 0
    kinds = [line.split()[1] for line in shown.stdout.splitlines()]
    assert kinds == ["reset", "stored", "ready"]
    assert space.model in shown.stdout
    assert all(key.hex()[:8] in shown.stdout for key in hashes)


def test_feed_prints_json(kvstore: Kvstore, space: Namespace, hashes: list[bytes]) -> None:
    ran = kvstore("feed", "--model", space.model, "--snapshot", "--json")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    stored = [line for line in lines if line["kind"] == "stored"]
    assert {key for line in stored for key in line["prefix_hashes"]} == {k.hex() for k in hashes}
    assert {line["model"]["id"] for line in stored} == {block_part(space).id.hex()}


def test_feed_of_no_node_is_one_error(kvstore: Kvstore) -> None:
    ran = kvstore("feed", "--snapshot", "-a", "127.0.0.1:1")
    assert (ran.code, ran.stdout) == (3, "")
    assert len(ran.stderr.splitlines()) == 1
