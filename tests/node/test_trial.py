"""Replays during which nodes die: the harness of the demo, benchmarks and fault tests."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_fleet import HERE, EtcdProcess, Fleet
from trial import Event, Trial, plot

from kvstore.errors import ConfigError
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.replay import replay_namespace
from kvstore.tools.trace import TraceRequest, conversations

FLAGS = ("--ram-bytes", "64MiB", "--log-level", "ERROR")


@pytest.fixture(scope="module")
def alone() -> Iterator[Fleet]:
    """Start one node."""
    with Fleet([HERE], *FLAGS) as fleet:
        yield fleet


@pytest.mark.long
def test_one_dead_member_causes_no_error_and_all_dead_do(tmp_path: Path) -> None:
    requests = conversations(60)
    with Fleet([HERE, HERE], *FLAGS, data=tmp_path) as fleet, fleet.client(timeout_s=5.0) as client:
        dies = Event(0.5, "n1 killed", fleet.nodes["n1"].kill)
        one = Trial(client, replay_namespace(4096), [dies])
        report = one.run(requests)
        assert (one.errors.total(), report.mismatches, one.events[0][1]) == (0, 0, "n1 killed")
        assert (
            0 < report.pages_hit < report.pages_asked == sum(second.asked for second in one.seconds)
        )
        assert sum(one.found[:30]) > 0
        fleet.nodes["n2"].kill()
        none = Trial(client, replay_namespace(4096))
        assert none.run(requests[:5]).pages_hit == 0
        assert none.errors.total() == sum(second.errors for second in none.seconds) > 0
        fleet.start("n1")
        assert (tmp_path / "n1").is_dir()
        assert fleet.nodes["n1"].running


@pytest.mark.long
def test_late_call_is_detected(alone: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.client(timeout_s=1.0, connect_timeout_s=1.0) as client:
        lookup = client.lookup
        monkeypatch.setattr(client, "lookup", lambda *given: time.sleep(1.3) or lookup(*given))
        trial = Trial(client, replay_namespace(4096))
        trial.run([TraceRequest(0.0, 1, 1, (1, 2))])
        assert trial.late_s >= 0.3
        assert trial.lag_s > 0
        assert trial.overdue_s == max(0.0, trial.late_s - trial.lag_s)


@pytest.mark.long
def test_trial_ends_with_the_error_of_an_event(alone: Fleet) -> None:
    with alone.client() as client:
        joins = Event(0.0, "n2 joins", alone.join)
        with pytest.raises(ConfigError, match="needs etcd"):
            Trial(client, replay_namespace(4096), [joins]).run(conversations(3))


def test_no_etcd() -> None:
    with pytest.raises(ConfigError, match="apt-get install etcd-server"):
        EtcdProcess(program="no-such-program")


def test_conversations_go_on() -> None:
    requests = conversations(2000)
    assert requests == conversations(2000) != conversations(2000, seed=2)
    assert all(len(set(request.hash_ids)) == len(request.hash_ids) for request in requests)
    known = {request.hash_ids for request in requests}
    assert sum(any(ids[:-new] in known for new in range(1, 9)) for ids in known) > len(known) / 2


def test_bars() -> None:
    assert plot([0.0, 0.5, 1.0, 2.0, None], 1.0) == "▁▅██ "
    assert plot([0.0], 0.0) == "▁"


def test_interrupted_start_of_a_node_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pid = tmp_path / "pid"
    # It interrupts this process when it has written its id, on a busy machine as well
    hanging = ("sh", "-c", f"echo $$ > {pid}; sleep 0.3; kill -ALRM $PPID; exec sleep 60")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            NodeProcess(inside=hanging)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
