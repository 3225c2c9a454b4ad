"""Run nodes on hosts of their own (network namespaces) and break things under load.

Run these tests with `make test-cluster`. `make test` leaves them out: they need root and take
minutes.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest
from network_hosts import Hosts, missing
from node_fleet import Fleet
from trial import Trial

from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.tools.replay import ReplayReport, replay_namespace
from kvstore.tools.trace import conversations

if not os.environ.get("KVSTORE_CLUSTER_FAULTS"):
    collect_ignore_glob = ["test_*.py"]
elif lacking := missing():
    pytest.exit(f"make test-cluster: {lacking}", 2)

THREADS = 3
CHUNK = 40  # requests; a thread checks its stop flag between two chunks
TIMEOUT_S = 1.0
LATE_S_MAX = 0.1
PAGE_NBYTES = 16384
SETTLE_S = 20.0
FLAGS = ("--ram-bytes", "256MiB", "--log-level", "WARNING", "--stall-s", "5")


@pytest.fixture(scope="session")
def all_hosts() -> Iterator[Hosts]:
    with Hosts(5) as hosts:
        yield hosts


@pytest.fixture
def hosts(all_hosts: Hosts) -> Iterator[Hosts]:
    yield all_hosts
    for place in all_hosts.places:
        all_hosts.heal(place)


class Load:
    """Replay chats from several threads until the block ends, as engines do.

    Each thread has a namespace of its own.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.trials: list[Trial] = []
        self.reports: list[ReplayReport] = []
        self._client = fleet.client(
            timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S, backoff_s_max=2.0
        )
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(THREADS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _run(self, number: int) -> None:
        namespace, seed = replay_namespace(PAGE_NBYTES), number
        while not self._stop.is_set():
            trial = Trial(self._client, namespace)
            self.trials.append(trial)
            self.reports.append(trial.run(conversations(CHUNK, seed)))
            seed += THREADS

    def run(self, seconds: float) -> None:
        time.sleep(seconds)

    @property
    def hit(self) -> int:
        return sum(report.pages_hit for report in self.reports)

    def check(self) -> None:
        """Assert that no byte was wrong, no call was late, and no error reached an engine."""
        assert len(self.reports) == len(self.trials) >= THREADS
        assert self.hit > 0
        assert sum(report.mismatches for report in self.reports) == 0
        assert [dict(trial.errors) for trial in self.trials if trial.errors] == []
        assert max(trial.overdue_s for trial in self.trials) <= LATE_S_MAX


@pytest.fixture
def load() -> Callable[[Fleet], Load]:
    return Load


def list_unsettled(fleet: Fleet) -> list[str]:
    """Return a line for each member that does not answer or still holds pages for clients."""
    found = []
    with fleet.client(timeout_s=5.0) as client:
        for address, status in client.statuses().items():
            if isinstance(status, KVStoreError):
                found.append(f"{address}: {status}")
            elif status.ram.writing_count or status.ram.held_count:
                found.append(
                    f"{address}: {status.ram.writing_count} being written, {status.ram.held_count} "
                    "held"
                )
    return found


@pytest.fixture
def settled() -> Callable[[Fleet], None]:
    """Check that all members answer, hold nothing, and stop with consistent books."""

    def check(fleet: Fleet) -> None:
        end = time.monotonic() + SETTLE_S
        while (kept := list_unsettled(fleet)) and time.monotonic() < end:
            time.sleep(0.5)
        assert kept == []
        for member, node in fleet.nodes.items():
            assert node.stop() == 0, f"{member}: {node.log_text}"
            assert "inconsistent" not in node.log_text, member
            assert "Traceback" not in node.log_text, member

    return check


@pytest.fixture
def flags() -> tuple[str, ...]:
    return FLAGS


@pytest.fixture
def namespace() -> Namespace:
    return replay_namespace(PAGE_NBYTES)
