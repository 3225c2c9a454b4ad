"""Record which of our files a call passes through, and how deep its stack is.

    python benchmarks/journeys.py [--frames] [--json] [--only put near hit]

    put     put of 64 pages over bulk TCP into one node
    near    get of 64 pages from a near node that has none of them: it fetches them from their owner
    hit     a hit of the block connector: scheduler, lookups and agents in processes of their own, a
            load. It is the path below `gpu_agent/engines/vllm.py`, which imports vLLM and is left
            out, so a real vLLM hit touches the files of that adapter, too

Nodes, clients and the engine's side run in this process, and a profiler's hook sees all threads.
The two processes beside the engine run the same hook and write what they saw. Only frames in
kvstore, node or gpu_agent count, without generated stubs; a stack is that of one thread. A journey
is made a few times before it is recorded, so that connections, namespaces and imports exist, and
then several times with new pages. Files that are in every recording count, as background threads
come and go; the stack is the shallowest recording's deepest one. Up to Python 3.11 a comprehension
is a frame, too.
"""

import argparse
import contextlib
import functools
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.keys import prefix_hashes
from node.config import NodeConfig
from node.server import Node

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
from ports import free_ports

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("kvstore", "node", "gpu_agent"))
PAGES = 64
PAGE_NBYTES = 64 << 10
WARM, RECORDED = 4, 5
WAIT_S = 30.0
RAM_NBYTES = 256 << 20
BLOCK = 16  # tokens
POOL = 2 * PAGES + 3  # blocks: two prompts, and block 0


@dataclass
class Seen:
    """Files of ours that ran, and the deepest stack of our frames, outermost first."""

    files: set[str] = field(default_factory=set)
    stack: list[str] = field(default_factory=list)


@functools.cache
def our_file(path: str) -> str:
    """Return a file's path below the root; empty if it is not ours or generated."""
    return path[len(str(ROOT)) + 1 :] if path.startswith(PACKAGES) and "/pb/" not in path else ""


class Recorder:
    """A profiler's hook for all threads that start after `install`.

    It notes calls while `on`.
    """

    def __init__(self) -> None:
        self.on = False
        self.seen = Seen()

    def install(self) -> None:
        """Install the profiler hook."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def begin(self) -> None:
        """Begin to record."""
        self.seen = Seen()
        self.on = True

    def end(self) -> Seen:
        """End the recording and return it."""
        self.on = False
        return self.seen

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event != "call" or not (file := our_file(frame.f_code.co_filename)):
            return
        seen = self.seen
        seen.files.add(file)
        stack: list[FrameType] = []
        each: FrameType | None = frame
        while each is not None:
            if our_file(each.f_code.co_filename):
                stack.append(each)
            each = each.f_back
        if len(stack) > len(seen.stack):
            seen.stack = [described(one) for one in reversed(stack)]


def described(frame: FrameType) -> str:
    """Describe a frame."""
    code = frame.f_code
    return f"{our_file(code.co_filename)} {getattr(code, 'co_qualname', code.co_name)}"


RECORDER = Recorder()


def child(folder: str, descriptor: str) -> None:
    """Run a worker process that records from SIGUSR1 to SIGUSR2."""
    path = Path(folder) / f"{os.getpid()}.json"

    def end(*_: object) -> None:
        seen = RECORDER.end()
        path.with_suffix(".new").write_text(json.dumps([sorted(seen.files), seen.stack]))
        path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGUSR1, lambda *_: RECORDER.begin())
    signal.signal(signal.SIGUSR2, end)
    path.with_suffix(".pid").touch()
    RECORDER.install()
    from gpu_agent.worker.__main__ import main as serve

    serve(int(descriptor))


class Children:
    """The recording processes of a folder, by their process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, __file__, "--child", str(folder)]

    def pids(self) -> list[int]:
        """Return the processes."""
        return [int(path.stem) for path in self.folder.glob("*.pid")]

    def begin(self) -> None:
        """Make all processes record."""
        for pid in self.pids():
            os.kill(pid, signal.SIGUSR1)

    def end(self) -> list[Seen]:
        """Return what each saw."""
        found = []
        for pid in self.pids():
            path = self.folder / f"{pid}.json"
            os.kill(pid, signal.SIGUSR2)
            wait_until(path.exists)
            files, stack = json.loads(path.read_text())
            path.unlink()
            found.append(Seen(set(files), stack))
        return found


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    end = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("a journey did not end")
        time.sleep(0.001)


@dataclass(frozen=True)
class Result:
    """A journey, how many of our files it touched, and its deepest stack."""

    journey: str
    files: list[str]
    stack: list[str]


def recorded(
    journey: str, call: Callable[[bool], None], children: Children | None = None
) -> Result:
    """Make a journey until it is warm, then record it.

    `call(False)` prepares what a call needs.
    """
    seen: list[Seen] = []
    for number in range(WARM + RECORDED):
        call(False)
        if number < WARM:
            call(True)
            continue
        if children:
            children.begin()
        RECORDER.begin()
        call(True)
        parts = [RECORDER.end(), *(children.end() if children else ())]
        deepest = max((part.stack for part in parts), key=len)
        seen.append(Seen(set().union(*(part.files for part in parts)), deepest))
    files = set.intersection(*(one.files for one in seen))
    return Result(journey, sorted(files), min((one.stack for one in seen), key=len))


@contextlib.contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """Start nodes in this process, one cluster if there are several."""
    ports = free_ports(count)
    members = ",".join(f"n{number}=bulk://127.0.0.1:{port}" for number, port in enumerate(ports))
    with contextlib.ExitStack() as stack:
        started = []
        for number, port in enumerate(ports):
            settings: dict[str, Any] = {"port": 0, "bulk_port": port, "metrics_port": 0}
            if count > 1:
                settings |= {"cluster": f"static:fleet/{members}", "member": f"n{number}"}
            node = Node(NodeConfig(ram_nbytes=RAM_NBYTES, log_level="ERROR", **settings))
            node.start()
            stack.callback(node.stop)
            started.append(node)
        yield started


def client_of(node: Node, **settings: Any) -> Client:
    """Return a client of a node."""
    return Client(ClientConfig(f"bulk://127.0.0.1:{node.bulk.port}", **settings))


def pages_of_one_namespace() -> tuple[Namespace, list[bytes]]:
    """Return a namespace and pages."""
    namespace = Namespace("journeys", opaque_layout(PAGE_NBYTES))
    return namespace, [secrets.token_bytes(PAGE_NBYTES) for _ in range(PAGES)]


def put_journey() -> Result:
    """Record a put of 64 pages over bulk TCP."""
    namespace, pages = pages_of_one_namespace()
    with nodes(1) as (node,), client_of(node, wire="bulk") as client:
        keys: list[bytes] = []

        def call(recording: bool) -> None:
            if recording:
                client.put(namespace, keys, pages)
            else:
                keys[:] = [secrets.token_bytes(32) for _ in pages]

        return recorded("put of 64 pages over bulk", call)


def near_journey() -> Result:
    """Record a get of 64 pages that the near node has to fetch."""
    namespace, pages = pages_of_one_namespace()
    buffers = [bytearray(PAGE_NBYTES) for _ in pages]
    with (
        nodes(2) as (near, owner),
        client_of(near, near="n0") as client,
        client_of(owner, near="none") as writer,
    ):
        view = near.membership.view
        assert view is not None
        keys: list[bytes] = []

        def call(recording: bool) -> None:
            if recording:
                assert all(client.get(namespace, keys, buffers)), "a page was not found"
                return
            some = [secrets.token_bytes(32) for _ in range(PAGES * 4)]
            owners = view.owners.owners(namespace.digest, some)
            keys[:] = [key for key, of in zip(some, owners, strict=True) if of[0] == "n1"][:PAGES]
            writer.put(namespace, keys, pages)

        return recorded("miss of a near node, 64 pages", call)


@dataclass
class Prompt:
    """A stand-in for an engine's request, with what the block scheduler reads."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0


class Engine:
    """The store's side of an engine: a scheduler, and one rank with one group on the CPU."""

    def __init__(self, address: str, children: Children) -> None:
        import torch

        from gpu_agent import AgentConfig
        from gpu_agent.blocks.backends import ShardPool
        from gpu_agent.blocks.groups import BlockGroup
        from gpu_agent.blocks.lookups import Lookups
        from gpu_agent.blocks.ranks import BlockRank
        from gpu_agent.blocks.save_plan import SavePlan
        from gpu_agent.blocks.scheduler import BlockScheduler
        from gpu_agent.layouts.vllm import table_pool
        from gpu_agent.worker.lookup_client import ProcessLookups
        from gpu_agent.worker.process_backend import ProcessBackend

        views = {
            f"layers.{i}": torch.randint(0, 256, (POOL, 2, BLOCK, 64), dtype=torch.uint8)
            for i in (0, 1)
        }
        pool = table_pool(views, POOL, BLOCK)
        self.namespace, client = Namespace("journeys", pool.layout), ClientConfig(address)
        self.client = Client(client)  # outside the journey, to see what is stored
        home = ProcessBackend(
            [ShardPool(self.namespace, pool)], client, AgentConfig(), children.command
        )
        self.rank = BlockRank(home, writes=True)

        def ready() -> bool:
            home.poll()
            return home.loads

        wait_until(ready)
        asker = ProcessLookups(client, children.command)
        assert asker.await_ready(WAIT_S)
        self.lookups = Lookups(asker, 5.0)
        plan = SavePlan(1, 4 * PAGES, 4, lambda _: None, lambda _: None)
        self.scheduler = BlockScheduler(
            [BlockGroup(BLOCK)], [[self.namespace]], BLOCK, BLOCK, self.lookups, plan
        )

    def matched(self, prompt: Prompt) -> int:
        """Ask until the answer is there, as an engine does in its steps."""
        self.scheduler.ask(prompt)
        while (tokens := self.scheduler.matched(prompt, 0)) is None:
            time.sleep(0.001)
        return tokens

    def step(self, prompts: dict[str, int], blocks: list[int]) -> Any:
        """Run one step of the engine."""
        orders = self.scheduler.step(prompts, lambda _: [blocks])
        self.rank.begin(orders)
        self.rank.load(orders.loads)
        self.rank.save(orders.saves)
        ended = self.rank.loads_ended()
        self.scheduler.ran(self.rank.report())
        return ended

    def save(self, prompt: Prompt, blocks: list[int]) -> None:
        """Store the blocks of a computed prompt, and wait for that."""
        self.matched(prompt)
        self.scheduler.allocated(prompt, [blocks], 0)
        self.step({prompt.request_id: prompt.num_tokens}, blocks)
        prompt.num_computed_tokens = prompt.num_tokens
        keys = prompt.block_hashes

        def stored() -> bool:
            self.step({}, blocks)
            return self.client.lookup(self.namespace, keys).prefix_pages == len(keys)

        wait_until(stored)
        self.scheduler.finished(prompt, [blocks])

    def hit(self, prompt: Prompt, blocks: list[int]) -> None:
        """Find and load all blocks but the last, which an engine computes."""
        tokens = self.matched(prompt)
        assert tokens == prompt.num_tokens // BLOCK * BLOCK, (
            f"{tokens} tokens of {prompt.num_tokens} hit"
        )
        self.scheduler.allocated(prompt, [blocks], tokens)
        wait_until(lambda: self.step({}, blocks).finished)

    def close(self) -> None:
        """Stop everything that was started."""
        self.rank.close()
        self.lookups.close()
        self.client.close()


def hit_journey() -> Result:
    """Record a hit of 64 blocks: lookup, allocation, load."""
    with tempfile.TemporaryDirectory() as folder, nodes(1) as (node,):
        children = Children(Path(folder))
        engine = Engine(f"bulk://127.0.0.1:{node.bulk.port}", children)
        blocks = list(range(1, PAGES + 2))  # vLLM never uses block 0
        others = list(range(PAGES + 2, 2 * PAGES + 3))
        made: list[Prompt] = []

        def prompt(tokens: list[int]) -> Prompt:
            return Prompt(secrets.token_hex(4), len(tokens), prefix_hashes(tokens, BLOCK))

        def call(recording: bool) -> None:
            if recording:
                engine.hit(made[0], others)
                return
            if made:
                engine.scheduler.finished(made[0], [others])
            tokens = [secrets.randbelow(1 << 30) for _ in range(PAGES * BLOCK + 5)]
            engine.save(prompt(tokens), blocks)
            made[:] = [prompt(tokens)]

        with contextlib.closing(engine):
            return recorded("hit of the block connector, 64 blocks", call, children)


JOURNEYS: dict[str, tuple[Callable[[], Result], str]] = {
    "put": (put_journey, "≤ 45 files, 16 frames"),
    "near": (near_journey, "≤ 50 files, 24 frames"),
    "hit": (hit_journey, "≤ 60 files"),
}


def main(words: list[str]) -> None:
    """Record the journeys and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=JOURNEYS, default=list(JOURNEYS))
    parser.add_argument("--frames", action="store_true", help="print the deepest stacks, too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(words)
    RECORDER.install()
    results = {name: JOURNEYS[name][0]() for name in given.only}
    if given.json:
        print(json.dumps({name: asdict(result) for name, result in results.items()}, indent=2))
        return
    print("| journey | files | deepest stack | aim |\n| --- | --: | --: | --- |")
    for name, result in results.items():
        print(
            f"| {result.journey} | {len(result.files)} | {len(result.stack)} | {JOURNEYS[name][1]} "
            "|"
        )
    if given.frames:
        for result in results.values():
            print(f"\n{result.journey}")
            print(
                "\n".join(
                    f"    {number:2}  {frame}" for number, frame in enumerate(result.stack, 1)
                )
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    main(sys.argv[1:])
