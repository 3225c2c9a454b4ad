"""`kvstore record` writes a trace of a node's calls, and its plan agrees with the node."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Kvstore

from kvstore import Client, ClientConfig, Namespace
from kvstore.cli import load as module
from kvstore.results import Recorded, RecordedUse
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.plan import Wishes, planned, surveyed
from kvstore.tools.replay import ReplayReport, replay, replay_namespace, throwaway_node
from kvstore.tools.survey import page_size
from kvstore.tools.trace import Chains, Recording, chatting, read_trace

CAPACITY = 400


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.1)
    monkeypatch.setattr(module, "STEP_S", 0.02)


@pytest.fixture(scope="module")
def small_node() -> Iterator[NodeProcess]:
    with throwaway_node(CAPACITY, 4096) as node:
        yield node


def recorded(
    kvstore: Kvstore,
    node: NodeProcess,
    work: Callable[[Client], object],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    code: int = 0,
) -> Any:
    """Run the command, and `does` once the node records.

    The command polls the node again only after `does` has returned, so the test needs no sleeps.
    """
    begun, done = threading.Event(), threading.Event()

    def beside() -> None:
        assert begun.wait(30.0)
        with Client(ClientConfig(address=node.address, timeout_s=30.0)) as client:
            work(client)
        done.set()

    real = Client.record

    def record(
        client: Client, seconds: float = 0.0, recording: bytes = b"", end: bool = False
    ) -> Recorded:
        if recording:
            assert done.wait(60.0)
        reply = real(client, seconds, recording, end or bool(recording))
        begun.set()
        return reply

    monkeypatch.setattr(Client, "record", record)
    other = threading.Thread(target=beside)
    other.start()
    ran = kvstore("record", "-a", node.address, "--seconds", "600", *arguments)
    other.join()
    assert ran.code == code, ran.stderr
    return ran


def test_plan_of_a_recording_matches_the_node(
    kvstore: Kvstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = list(chatting(300, at_a_time=16))
    reports: list[ReplayReport] = []
    path = tmp_path / "trace.jsonl"

    def work(client: Client) -> None:
        reports.append(replay(client, requests, replay_namespace(4096)))

    with throwaway_node(CAPACITY, 4096) as node:
        found = recorded(kvstore, node, work, monkeypatch, "-o", str(path), "--json").json
    trace = list(read_trace(path))
    assert (found["requests"], found["dropped"], len(trace)) == (
        300,
        0,
        found["requests"] + found["stored"],
    )
    asked = [request for request in trace if not request.stored]
    assert [len(request.hash_ids) for request in asked] == [
        len(request.hash_ids) for request in requests
    ]
    assert {(request.page_nbytes, request.page_tokens) for request in trace} == {(4096, 1)}
    page = page_size(trace, None, None, None)
    wishes = Wishes(page, 1000.0, ram=(CAPACITY * 4096,))
    row = planned(surveyed(trace, wishes), wishes).rows[0]
    assert 0.1 < row.hit_rate < 0.95
    assert abs(row.hit_rate - reports[0].prefix_hit_rate) <= 0.003, (
        "the plan assumes exact LRU, as in the node"
    )


def test_recording_has_neither_keys_nor_names(
    kvstore: Kvstore,
    shared_node: NodeProcess,
    space: Namespace,
    hashes: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(
        kvstore,
        shared_node,
        lambda client: client.lookup(space, hashes),
        monkeypatch,
        "-o",
        str(path),
    )
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line["hash_ids"] == list(range(len(line["hash_ids"]))) for line in lines)
    assert all(0 <= number < 1000 for line in lines for number in line["hash_ids"])
    assert {key for line in lines for key in line} <= {
        "timestamp", "input_length", "output_length", "hash_ids", "page_nbytes", "page_tokens",
        "stored",
    }  # fmt: skip
    assert lines[-1]["input_length"] == 12, "three pages of four tokens"
    assert space.model not in text


def test_existing_file_is_not_overwritten(kvstore: Kvstore, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    ran = kvstore("record", "-o", str(path))
    assert (ran.code, path.read_text()) == (2, "mine")
    assert "exists already; name another file" in ran.stderr


def test_full_disk_is_reported_and_leaves_no_file(
    kvstore: Kvstore, small_node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(recording: Recording) -> Iterator[str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recording, "lines", full)
    ran = kvstore(
        "record", "-a", small_node.address, "-o", str(tmp_path / "trace.jsonl"), "--seconds", "0.05"
    )
    assert ran.code == 74
    assert "No space left" in ran.stderr
    assert not (tmp_path / "trace.jsonl").exists(), "an empty file was left"


def test_record_without_requests_writes_no_file(
    kvstore: Kvstore, small_node: NodeProcess, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    ran = kvstore("record", "-a", small_node.address, "-o", str(path), "--seconds", "0.05")
    assert (ran.code, path.exists()) == (1, False)
    assert "no client asked" in ran.stderr


def test_second_recording_is_refused_until_the_first_ends(
    kvstore: Kvstore, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    first = client.record(60.0).recording
    ran = kvstore("record", "-o", str(path), "--seconds", "0.05")
    assert (ran.code, path.exists()) == (4, False)
    assert "only one recording at a time" in ran.stderr
    while not client.record(recording=first, end=True).over:
        pass


def test_record_ends_at_the_size_limit(
    kvstore: Kvstore, small_node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(client: Client) -> None:
        replay(client, list(chatting(30)), replay_namespace(4096))

    path = tmp_path / "trace.jsonl"
    ran = recorded(kvstore, small_node, work, monkeypatch, "-o", str(path), "--max-bytes", "1")
    assert "--max-bytes 1 were reached" in ran.stderr
    assert path.read_text().count("\n") == 60


def test_interrupt_keeps_the_recorded_and_reports_the_dropped_requests(
    kvstore: Kvstore, small_node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(
        client: Client, seconds: float = 0.0, recording: bytes = b"", end: bool = False
    ) -> Recorded:
        if recording and not end:
            raise KeyboardInterrupt
        use = RecordedUse(pages=(1, 2), page_nbytes=8, page_tokens=0.5)
        return Recorded(recording=b"some", uses=(use,) * end, over=end, dropped=789)

    monkeypatch.setattr(Client, "record", record)
    ran = kvstore("record", "-a", small_node.address, "-o", str(tmp_path / "trace.jsonl"), "--json")
    assert (ran.code, ran.json["requests"], ran.json["dropped"]) == (130, 1, 789)
    assert (
        "789 requests exceeded the node's memory for recordings and are missing in the trace"
    ) in ran.stderr


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_time_of_zero_or_less_is_refused(kvstore: Kvstore, tmp_path: Path, seconds: str) -> None:
    ran = kvstore("record", "-o", str(tmp_path / "trace.jsonl"), "--seconds", seconds)
    assert ran.code == 2
    assert "--seconds" in ran.stderr


# ---- chains ----------------------------------------------------------------------------------


def test_later_requests_complete_the_beginning_of_a_chain(tmp_path: Path) -> None:
    with (tmp_path / "spool").open("w+b") as spool:
        recording = Recording(spool)
        for stored, pages in (
            (True, (70, 80)),
            (False, (50, 60)),
            (True, (50, 60, 70, 80)),
            (False, ()),
        ):
            recording.add(
                Recorded(
                    uses=(RecordedUse(0, stored, page_nbytes=8, page_tokens=0.5, pages=pages),)
                )
            )
        lines = [json.loads(line) for line in recording.lines()]
    assert [line["hash_ids"] for line in lines] == [[2, 3, 0, 1], [2, 3], [2, 3, 0, 1]]
    assert [line["input_length"] for line in lines] == [2, 1, 2]
    assert (recording.requests, recording.stores) == (1, 2)


def test_record_size_limit_counts_written_lines_only(
    tmp_path: Path,
) -> None:
    """The size limit counts written lines, which repeat all earlier pages of a chain.

    An engine that decodes stores one page at a time.
    """
    with (tmp_path / "spool").open("w+b") as spool:
        recording = Recording(spool)
        for page in range(400):
            recording.add(
                Recorded(
                    uses=(
                        RecordedUse(
                            stored=True, pages=(page + 7, page + 8), page_nbytes=8, page_tokens=0.5
                        ),
                    )
                )
            )
        waits, nbytes = spool.tell(), sum(map(len, recording.lines()))
    assert nbytes > 5 * waits
    assert 0.8 < recording.nbytes / nbytes < 1.25


def test_cyclic_keys_do_not_loop() -> None:
    chains = Chains()
    numbers = [chains.add(ids) for ids in ([1, 2], [2, 1], [3, 3, 1, 3])]
    assert numbers == [[0, 1], [1, 0], [2, 0]]
    assert [chains.whole(some) for some in numbers] == [[0, 1], [1, 0], [2, 0]]
    assert chains.whole([0]) == [1, 0]


@pytest.mark.parametrize("used", [True, False])
def test_recording_whose_file_is_removed_meanwhile_is_reported(
    kvstore: Kvstore,
    shared_node: NodeProcess,
    space: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    used: bool,
) -> None:
    """Regression: a traceback, or a trace that was reported as written and did not exist."""
    path = tmp_path / "trace.jsonl"

    def work(client: Client) -> None:
        path.unlink()
        if used:
            client.open(space)
            client.lookup(space, [bytes(20)])

    ran = recorded(kvstore, shared_node, work, monkeypatch, "-o", str(path), code=74 if used else 1)
    assert ("was removed while it was written" if used else "is not written") in ran.stderr
    assert not path.exists()
