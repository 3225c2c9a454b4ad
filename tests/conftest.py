"""Fixtures shared by all tests: a real node in a child process, and a client of it."""

import sys

import hermetic  # noqa: F401 -- cleans the environment, before anything is imported that reads it

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

import pytest
from authorities import ours as ours
from authorities import strangers as strangers
from waiting import OthersRun

from kvstore import Client, ClientConfig, DeadlineExceeded, Unavailable, checksum
from kvstore.tools.node_process import NodeProcess

# Before torch is imported: a worker has a core, and a second thread would wait
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# How much later than its deadline a call may return.
LATE_S = 0.25
# On a host that gives its processors to others for seconds, a node that lives takes longer than two
# to say hello.
PATIENT_S, CONNECT_S = 30.0, 20.0
MEASURED_COUNT = 3
# Files of few tests that take long, most of it waiting: they begin first, or the last worker would
# be alone with one.
LONG = (
    "test_stalled_fs.py",
    "test_process_faults.py",
    "test_transformers_paged.py",
    "test_hangs.py",
    "test_demo.py",
    "test_wheel.py",
    "test_reads.py",
    "test_io_process.py",
    "test_imports.py",
    "test_epochs.py",
    "test_askers.py",
    "test_reconnect.py",
    "test_r11_pages_on_disk_outlive_the_process.py",
    "test_crash_short.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and nothing that was imported afterwards.

    What is imported stays. Transformers asks for a collection at every turn, and each took a
    quarter of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[str]:
    """Where nodes put their Unix sockets; short, because the paths of sockets must be."""
    directory = tempfile.mkdtemp(prefix="kvstore-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """One node for all tests that neither stop it nor fill it.

    Use namespaces of your own.
    """
    with NodeProcess("--ram-bytes", "256MiB", "--extent-bytes", "16MiB") as node:
        yield node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def client(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Client]:
    """A client of the shared node, once over each wire."""
    config = ClientConfig(
        shared_node.address, wire=request.param, timeout_s=PATIENT_S, connect_timeout_s=CONNECT_S
    )
    with Client(config) as client:
        yield client


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages of a few KiB have several leaves."""
    monkeypatch.setattr(checksum, "LEAF_NBYTES", 256)
    checksum.cuts.cache_clear()
    yield
    monkeypatch.undo()
    checksum.cuts.cache_clear()


@pytest.fixture
def seed() -> int:
    """Printed, so that a failure can be repeated with KVSTORE_SEED."""
    chosen = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={chosen}")
    return chosen


@pytest.fixture
def others_run() -> Iterator[OthersRun]:
    """Whether another thread ran while a call did.

    No thread is made to give up the GIL here, so one that does not do so by itself is alone until
    it returns, on any machine: this is never True of a call that keeps the GIL. One that gives it
    up is asked again, because a busy machine may have no core for the other thread just then.
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
    """`by_deadline(names, deadline_s, prepare, begin=...)`: each `prepare(name)` gives a call,
    which must fail with DeadlineExceeded or Unavailable not later than LATE_S after its deadline.
    They run at the same time, after `begin`.

    A busy machine may leave a thread without a core for longer than that, so those that were late
    are prepared and measured again, MEASURED_COUNT times in all: a call that does not keep its
    deadline is late each time.
    """

    def check(
        names: Iterable[str],
        deadline_s: float,
        prepare: Callable[[str], Callable[[], object]],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        for _ in range(MEASURED_COUNT):
            calls = {name: prepare(name) for name in names}
            begin()
            with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
                seconds = dict(
                    zip(calls, pool.map(_seconds_until_it_fails, calls.values()), strict=True)
                )
            late = {
                name: f"{took:.2f} s"
                for name, took in seconds.items()
                if took > deadline_s + LATE_S
            }
            if not late:
                return
            names = list(late)
        raise AssertionError(
            f"deadlines of {deadline_s} s and {LATE_S} s for a busy machine, missed each time: "
            f"{late}"
        )

    return check


def _seconds_until_it_fails(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        call()
    return time.monotonic() - started


@pytest.fixture
def swallowing_port() -> Iterator[int]:
    """Its backlog is full: connecting is not answered, as behind a firewall that drops packets."""
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
