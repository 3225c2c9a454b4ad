"""Fixtures shared by all tests: a real node in a child process, and a client of it."""

import sys

import hermetic  # noqa: F401 -- cleans the environment before other imports read it

# isort: split
import concurrent.futures
import gc
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest
from authorities import ours as ours
from authorities import strangers as strangers
from waiting import PATIENT, OthersRun

from kvstore import Client, ClientConfig, DeadlineExceeded, Unavailable, checksum
from kvstore.tools.node_process import NodeProcess

# Set before torch is imported: each worker has one core, and a second thread would wait for it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# How much later than its deadline a call may return on a busy machine.
LATE_S = 0.25
MEASURED_COUNT = 10
# Slow files with few tests, which mostly wait. They start first; otherwise the last worker would
# end up running one of them alone.
LONG = (
    "test_stalled_fs.py",
    "test_process_faults.py",
    "test_transformers_paged.py",
    "test_hangs.py",
    "test_wheel.py",
    "test_shared_port.py",
    "test_life.py",
    "test_ends.py",
    "test_streams.py",
    "test_reads.py",
    "test_io_process.py",
    "test_reconnect.py",
    "test_r11_pages_on_disk_outlive_the_process.py",
    "test_crash_short.py",
)

# Files that use transformers, whose import takes three seconds: one worker runs all of them.
WITH_TRANSFORMERS = (
    "test_demo.py",
    "test_facts.py",
    "test_rope.py",
    "test_table.py",
    "test_tenants.py",
    "test_transformers.py",
    "test_transformers_paged.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and all files that use transformers to the same one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            in_one = "gpu_agent/" in path and path.endswith(WITH_TRANSFORMERS)
            return "transformers" if in_one else path

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during imports, and freeze what they allocated.

    Imported objects live until the end. Transformers often triggers a full collection, and each
    took 250 ms while it included them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[str]:
    """Create the directory for the nodes' Unix sockets.

    Its path is short because the paths of Unix sockets are limited to about 100 bytes.
    """
    directory = tempfile.mkdtemp(prefix="kvstore-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """Start one node for all tests that neither stop it nor fill it.

    Each test uses its own namespaces.
    """
    with NodeProcess("--ram-bytes", "64MiB", "--extent-bytes", "16MiB") as node:
        yield node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def client(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Client]:
    """Connect a client to the shared node, once over each wire."""
    with Client(ClientConfig(shared_node.address, wire=request.param, **PATIENT)) as client:
        yield client


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the leaf size to 256 bytes, so that pages of a few KiB have several leaves."""
    monkeypatch.setattr(checksum, "LEAF_NBYTES", 256)
    checksum.cuts.cache_clear()
    yield
    monkeypatch.undo()
    checksum.cuts.cache_clear()


@pytest.fixture
def seed() -> int:
    """Return a random seed and print it, so that KVSTORE_SEED can repeat a failure."""
    chosen = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={chosen}")
    return chosen


@pytest.fixture
def others_run() -> Iterator[OthersRun]:
    """Return a function that tells whether another thread ran during a call.

    The switch interval is 60 s, so no thread is forced to release the GIL. A call that keeps the
    GIL therefore never returns True, on any machine. A call that releases it is repeated up to 50
    times, because a busy machine may not schedule the other thread at once.
    """
    interval, stop, turns = sys.getswitchinterval(), threading.Event(), [0]

    def other() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    def ran(call: Callable[[], object]) -> bool:
        for _ in range(50):
            time.sleep(0.001)
            before = turns[0]
            call()
            if turns[0] > before:
                return True
        return False

    thread = threading.Thread(target=other)
    sys.setswitchinterval(60.0)
    try:
        thread.start()
        yield ran
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


@pytest.fixture
def by_deadline() -> Callable[..., None]:
    """Return a check that calls fail with DeadlineExceeded or Unavailable by their deadline.

    `by_deadline(names, deadline_s, prepare, begin=...)`: each `prepare(name)` returns a call. The
    calls run in parallel after `begin`, and may fail at most LATE_S after the deadline.

    A busy machine may leave a thread without a core for longer than that. Late calls are therefore
    measured again, each alone, MEASURED_COUNT times in all: a call that ignores its deadline is
    late each time.
    """

    def measured(
        names: Iterable[str],
        deadline_s: float,
        prepare: Callable[[str], Callable[[], object]],
        begin: Callable[[], object],
    ) -> dict[str, str]:
        """Return the late calls."""
        calls = {name: prepare(name) for name in names}
        begin()
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            seconds = pool.map(_seconds_until_it_fails, calls.values())
            took = dict(zip(calls, seconds, strict=True))
        return {name: f"{s:.2f} s" for name, s in took.items() if s > deadline_s + LATE_S}

    def check(
        names: Iterable[str],
        deadline_s: float,
        prepare: Callable[[str], Callable[[], object]],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        late = measured(names, deadline_s, prepare, begin)
        for _ in range(MEASURED_COUNT - 1):
            again = [measured([name], deadline_s, prepare, begin) for name in late]
            late = {name: took for one in again for name, took in one.items()}
        if not late:
            return
        raise AssertionError(
            f"calls ended more than {LATE_S} s after their deadline of {deadline_s} s in all "
            f"{MEASURED_COUNT} attempts: {late}"
        )

    return check


def _seconds_until_it_fails(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        call()
    return time.monotonic() - started


@pytest.fixture
def swallowing_port() -> Iterator[int]:
    """Return a port whose backlog is full.

    Connections to it get no answer, as behind a firewall that drops packets.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for sock in waiting:
            sock.close()
