"""Fixtures for LMCache's adapters: a node, and adapters that LMCache itself makes from JSON."""

import hashlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tarfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # it would report every start to LMCache's authors

import torch

with warnings.catch_warnings():  # from LMCache and its imports
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

from kvstore.tools.node_process import NodeProcess

ROOT = Path(__file__).parents[3]
SUITE = Path(sys.prefix) / "lmcache_sdist"
WAIT_S = 60.0
FORMS = ("native_plugin", "plugin")
RANK = 0x01000100  # the rank of a single worker
# The memory used by a server with an L1 of 1 GiB, its bench, a run of LMCache's test suite and two
# nodes together.
MEMORY_NBYTES = 5 << 30


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    warnings.simplefilter("default")  # plugins of LMCache's own tests warn
    config.addinivalue_line("filterwarnings", "default")


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run early if there is too little memory, instead of having processes killed."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(found[1]) << 10 if found else MEMORY_NBYTES
    if available < MEMORY_NBYTES and os.environ.get("KVSTORE_LMCACHE_MEMORY") != "ignore":
        pytest.exit(
            f"LMCache's tests need {MEMORY_NBYTES >> 30} GiB of free memory, and "
            f"{available / (1 << 30):.1f} GiB are "
            "available: end other programs, or run a part of the tests (ARGS='-k names') "
            "with KVSTORE_LMCACHE_MEMORY=ignore",
            returncode=1,
        )


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    flags = ("--ram-bytes", "512MiB", "--extent-bytes", "32MiB")
    with NodeProcess(*flags, python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)) as node:
        yield node


@pytest.fixture
def start() -> Callable[..., NodeProcess]:
    return lambda *flags: NodeProcess(
        *flags, python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
    )


@pytest.fixture
def unused_address() -> Iterator[str]:
    """Return an address that refuses connections: its port is bound but does not listen."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    """Return `spec(form, address, **params)`, which makes the JSON for --l2-adapter.

    By default each spec has its own namespace and the longest allowed deadlines, for busy machines.
    """

    def make(form: str, address: str, **params: Any) -> dict[str, Any]:
        own: dict[str, Any] = {
            "lookup_timeout_s": 2.0,
            "connect_timeout_s": 2.0,
            "kv_format": "test",
        }
        return {
            "type": form,
            "module_path": "gpu_agent.engines.lmcache",
            "class_name": {"native_plugin": "NodeConnector", "plugin": "NodeAdapter"}[form],
            "adapter_params": {
                "address": address,
                "revision": "test",
                "salt": uuid.uuid4().hex,
                **own,
                **params,
            },
        }

    return make


class Driver:
    """Drive an adapter as LMCache's controllers do: each call waits on its event descriptor."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[ObjectKey], objects: list[Any], wait_s: float = WAIT_S) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        done: dict[int, Any] = {}

        def poll() -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        return self._wait(self.adapter.get_store_event_fd(), poll, wait_s)

    def lookup(
        self, keys: list[ObjectKey], layouts: dict[int, Any] | None = None, wait_s: float = WAIT_S
    ) -> list[bool]:
        empty = {key.object_group_id: MemoryLayoutDesc(shapes=[], dtypes=[]) for key in keys}
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts or empty)
        poll = lambda: self.adapter.query_lookup_and_lock_result(task)  # noqa: E731
        return self._bits(
            self._wait(self.adapter.get_lookup_and_lock_event_fd(), poll, wait_s), len(keys)
        )

    def load(self, keys: list[ObjectKey], objects: list[Any], wait_s: float = WAIT_S) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        poll = lambda: self.adapter.query_load_result(task)  # noqa: E731
        return self._bits(self._wait(self.adapter.get_load_event_fd(), poll, wait_s), len(keys))

    @staticmethod
    def _wait(fd: int, poll: Callable[[], Any], wait_s: float) -> Any:
        end = time.monotonic() + wait_s
        while True:
            result = poll()
            if result is not None:
                return result
            left_s = end - time.monotonic()
            assert left_s > 0, "the adapter did not answer"
            if select.select([fd], [], [], left_s)[0]:
                consume_fd(fd)

    @staticmethod
    def _bits(bitmap: Any, count: int) -> list[bool]:
        return [bool(bitmap.test(i)) for i in range(count)]


@pytest.fixture
def open_adapter() -> Iterator[Callable[[dict[str, Any]], Driver]]:
    """Return a function that makes an adapter as `lmcache server --l2-adapter JSON` does."""
    adapters: list[Any] = []

    def make(spec: dict[str, Any]) -> Driver:
        config = parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(spec)]))
        adapters.append(create_l2_adapter(config.adapters[0]))
        return Driver(adapters[-1])

    yield make
    for adapter in adapters:
        adapter.close()


@pytest.fixture
def driver(
    form: str,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Callable[[dict[str, Any]], Driver],
    shared_node: NodeProcess,
) -> Driver:
    opened: Driver = open_adapter(spec(form, shared_node.address))
    return opened


@pytest.fixture
def keys_of() -> Callable[..., list[ObjectKey]]:
    def make(count: int, first: int = 0, **parts: Any) -> list[ObjectKey]:
        common = {"model_name": "m", "kv_rank": RANK, **parts}
        return [
            ObjectKey(chunk_hash=hashlib.sha256(b"%d" % i).digest(), **common)
            for i in range(first, first + count)
        ]

    return make


@pytest.fixture
def objects_of() -> Callable[..., list[TensorMemoryObj]]:
    """Return a function that makes objects in one buffer, filled with random bytes or zeros."""

    def make(
        count: int, shape: tuple[int, ...] = (2, 3, 64), dtype: Any = None, fill: bool = True
    ) -> Any:
        dtype = dtype or torch.float16
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        data = (
            torch.randint(0, 256, (count, nbytes)) if fill else torch.zeros((count, nbytes))
        ).to(torch.uint8)
        return [
            TensorMemoryObj(
                row.view(dtype).view(-1) if nbytes % dtype.itemsize == 0 else row,
                MemoryObjMetadata(
                    shape=torch.Size(shape),
                    dtype=dtype,
                    address=0,
                    phy_size=nbytes,
                    fmt=MemoryFormat.KV_2LTD,
                    ref_count=1,
                ),
                parent_allocator=None,
            )
            for row in data
        ]

    return make


@pytest.fixture
def environment() -> dict[str, str]:
    """Return the environment of processes that load our adapters."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"}


@pytest.fixture
def lmcache(
    tmp_path: Path, environment: dict[str, str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a function that runs `lmcache ...` in a process of its own."""

    def run(*arguments: str, timeout_s: float = 180.0) -> "subprocess.CompletedProcess[str]":
        command = [str(Path(sys.prefix) / "bin" / "lmcache"), *arguments]
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=tmp_path,
            env=environment,
        )

    return run


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Extract LMCache's own tests from the source distribution fetched by install.sh."""
    found = sorted(SUITE.glob("lmcache-*.tar.gz"))
    assert found, f"no source distribution in {SUITE}; run tests/engines/lmcache/install.sh"
    folder = tmp_path_factory.mktemp("upstream")
    with tarfile.open(found[-1]) as archive:
        top = archive.getnames()[0].partition("/")[0]
        wanted = [
            member
            for member in archive.getmembers()
            if member.name.startswith(f"{top}/tests/") or member.name == f"{top}/pytest.ini"
        ]
        archive.extractall(folder, wanted, filter="data")
    return folder / top
