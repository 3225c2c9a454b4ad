"""Crash harness: kill a node under mixed load at random moments and check what is on its disk.

    python tests/helpers/crash.py --cycles 300        KVSTORE_SEED=... repeats the choice of
                                                      operations

Each cycle starts a node in a child process on the same data directory. `THREADS` clients put
(durably or not, with or without a TTL), get, remove, pin and flush pages of three sizes. After
SIGKILL, a node in this process opens the directory. These invariants must hold:

    any page that is found       has exactly the bytes that follow from its key
    put durably, or flushed      is found, in this and all later cycles, until it is removed
    removed, then flushed        is not found
    TTL expired                  is not found
    check()                      reports nothing

In every fourth cycle the disk is too small for the load and evicts, so any page may be missing.
"""

import argparse
import hashlib
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from locked import key_file

from kvstore import Client, ClientConfig, Exhausted, Namespace, PutOutcome, opaque_layout
from kvstore.errors import KVStoreError
from kvstore.results import Keep
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content
from node.config import NodeConfig
from node.server import Node

THREADS = 3
BATCH_PAGES_MAX = 6
LOAD_S_MAX = 0.5
NAMESPACES = [
    Namespace(f"crash {nbytes}", opaque_layout(nbytes)) for nbytes in (4096, 20_000, 65_536)
]
RAM = {"ram_nbytes": 4 << 20, "extent_nbytes": 128 << 10}  # far less than what is put
DISK_NBYTES, DISK_EXTENT_NBYTES = 96 << 20, 1 << 20
SMALL_DISK_NBYTES = 4 << 20
# A load puts less than the rest of the disk, so durable pages are never evicted
WIPE_NBYTES = 32 << 20

PageKey = tuple[int, bytes]  # index of the namespace, prefix hash


class Failure(Exception):
    """An invariant is violated."""


@dataclass
class Known:
    """The expected state of the pages that one client thread writes."""

    durable: set[PageKey] = field(default_factory=set)  # must be found
    visible: set[PageKey] = field(default_factory=set)  # stored; durable after a flush
    removed: set[PageKey] = field(default_factory=set)  # gone after a flush
    gone: set[PageKey] = field(default_factory=set)  # must not be found
    # Time after which each must not be found
    mortal: dict[PageKey, float] = field(default_factory=dict)

    def forget(self, keys: Sequence[PageKey]) -> None:
        for keys_of_a_kind in (self.durable, self.visible, self.removed, self.gone):
            keys_of_a_kind.difference_update(keys)
        for key in keys:
            self.mortal.pop(key, None)


class Load:
    """One client thread."""

    def __init__(self, address: str, known: Known, seed: str, stop: threading.Event) -> None:
        self._client = Client(ClientConfig(address=address, wire="bulk"))
        self._known = known
        self._rng = random.Random(seed)
        self._stop = stop
        self._seed = seed
        self._count = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
            if self._client.stats.corrupt_pages:
                raise Failure(f"the node sent {self._client.stats.corrupt_pages} wrong pages")
        except KVStoreError as error:
            if not self._stop.is_set():
                self.error = error
        except Exception as error:  # noqa: BLE001 -- raised again in the main thread
            self.error = error
        finally:
            self._client.close()

    def _step(self) -> None:
        operation = self._rng.choices(
            [self._put, self._get, self._remove, self._pin, self._flush], weights=[50, 25, 12, 5, 8]
        )[0]
        try:
            operation()
        except Exhausted:  # RAM is full of pinned or used pages
            pass

    def _some(self) -> tuple[int, list[bytes]]:
        """Return a few pages of one namespace that were stored at some time."""
        keys = sorted(self._known.visible | self._known.durable)
        if not keys:
            return 0, []
        index = self._rng.choice(keys)[0]
        of_namespace = [prefix_hash for i, prefix_hash in keys if i == index]
        return index, self._rng.sample(of_namespace, min(len(of_namespace), BATCH_PAGES_MAX))

    def _put(self) -> None:
        known, index = self._known, self._rng.randrange(len(NAMESPACES))
        hashes = []
        for _ in range(self._rng.randint(1, BATCH_PAGES_MAX)):
            self._count += 1
            hashes.append(hashlib.sha256(f"{self._seed} {self._count}".encode()).digest())
        durable, ttl_s = self._rng.random() < 0.4, self._rng.choice([0, 0, 0, 1, 1000])
        # A page whose removal was not flushed may reappear after a kill, without a TTL.
        dead = known.gone if ttl_s == 1 else known.removed | known.gone
        keys = [(index, h) for h in hashes] + [key for key in sorted(dead) if key[0] == index][:1]
        known.forget(keys)
        namespace = NAMESPACES[index]
        contents = [
            page_content(namespace.digest, h, namespace.layout.page_nbytes) for _, h in keys
        ]
        outcomes = self._client.put(namespace, [h for _, h in keys], contents, Keep(ttl_s, durable))
        for key, outcome in zip(keys, outcomes, strict=True):
            if ttl_s == 1:
                known.mortal[key] = time.time() + ttl_s
            elif outcome in (PutOutcome.STORED, PutOutcome.EXISTS):
                (known.durable if durable else known.visible).add(key)

    def _get(self) -> None:
        index, hashes = self._some()
        if hashes:
            check_bytes(self._client, index, hashes)

    def _remove(self) -> None:
        index, hashes = self._some()
        if not hashes:
            return
        keys = [(index, prefix_hash) for prefix_hash in hashes]
        self._known.forget(keys)
        self._client.remove(NAMESPACES[index], hashes)
        self._known.removed.update(keys)

    def _pin(self) -> None:
        index, hashes = self._some()
        if hashes:
            self._client.pin(NAMESPACES[index], hashes[:2], self._rng.choice([0.05, 1.0]))

    def _flush(self) -> None:
        """Flush, and mark the pages that are still present as durable.

        A stored page may be evicted before the flush reaches it. A page that is present after the
        flush was present during it.
        """
        known = self._known
        self._client.flush()
        for index, namespace in enumerate(NAMESPACES):
            hashes = [h for i, h in sorted(known.visible) if i == index]
            if hashes:
                present = self._client.lookup(namespace, hashes).present
                flushed = {
                    (index, h) for h, is_there in zip(hashes, present, strict=True) if is_there
                }
                known.durable |= flushed
                known.visible -= flushed
        known.gone |= known.removed
        known.removed.clear()


def check_bytes(client: Client, index: int, hashes: Sequence[bytes]) -> list[bool]:
    namespace = NAMESPACES[index]
    nbytes = namespace.layout.page_nbytes
    buffers = [bytearray(nbytes) for _ in hashes]
    hits = client.get(namespace, hashes, buffers)
    for prefix_hash, hit, buffer in zip(hashes, hits, buffers, strict=True):
        if hit and buffer != page_content(namespace.digest, prefix_hash, nbytes):
            raise Failure(f"wrong bytes under {prefix_hash.hex()}")
    return hits


class Crashes:
    """Cycles on one data directory.

    `evicting`: the disk is too small for all pages.
    """

    def __init__(self, data_dir: Path, seed: int, evicting: bool, key: dict[str, str]) -> None:
        self._data_dir = data_dir
        self._seed = seed
        self._evicting = evicting
        self._key = key
        self._known = [Known() for _ in range(THREADS)]
        self.counts: Counter[str] = Counter()

    def _settings(self) -> dict[str, object]:
        disk_nbytes = SMALL_DISK_NBYTES if self._evicting else DISK_NBYTES
        disk = {
            "data_dir": str(self._data_dir),
            "disk_nbytes": disk_nbytes,
            "disk_extent_nbytes": DISK_EXTENT_NBYTES,
        }
        return {
            **RAM,
            **disk,
            **self._key,
            "scrub_nbytes_per_s": 16 << 20,
            "drain_s": 0.0,
            "stall_s": 0.2,
            "log_level": "ERROR",
        }

    def cycle(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        flags = [
            part for name, value in self._settings().items() for part in (_flag(name), str(value))
        ]
        process = NodeProcess(*flags)
        stop = threading.Event()
        loads = [
            Load(process.address, known, f"{self._seed} {number} {i}", stop)
            for i, known in enumerate(self._known)
        ]
        try:
            for load in loads:
                load.thread.start()
            end = time.monotonic() + 10.0
            while (
                number == 0
                and not any(known.durable for known in self._known)
                and time.monotonic() < end
            ):
                # A durable page before the first kill, so that even a short run checks something
                time.sleep(0.005)
            stop.wait(rng.uniform(0.01, LOAD_S_MAX))
        finally:
            stop.set()
            process.kill()
            for load in loads:
                load.thread.join()
        for known in self._known:
            known.removed.clear()  # removals that were not flushed may be undone for good
        for load in loads:
            if load.error:
                raise Failure(f"under load: {load.error!r}") from load.error
        self._inspect()
        self.counts["cycles"] += 1

    def _inspect(self) -> None:
        """Open the directory in this process, check everything and close it gracefully."""
        settings = self._settings() | {"stall_s": 60.0}  # a busy machine is not a stalled disk
        node = Node(NodeConfig(host="127.0.0.1", port=0, bulk_port=0, metrics_port=0, **settings))  # type: ignore[arg-type]
        node.start()
        try:
            self._raise_violations(node)
            with Client(
                ClientConfig(address=f"127.0.0.1:{node.grpc.port}", wire="bulk", timeout_s=30.0)
            ) as client:
                for index in range(len(NAMESPACES)):
                    self._check_namespace(client, index)
                if client.stats.corrupt_pages:
                    raise Failure(f"the node sent {client.stats.corrupt_pages} wrong pages")
                disk = client.node_status().disk
                if disk.state != "SERVING" or disk.rows_damaged:
                    raise Failure(
                        f"the disk tier is {disk.state} {disk.reason}, {disk.rows_damaged} damaged "
                        "rows"
                    )
                self.counts["quarantined"] += disk.pages_corrupt
                if disk.used_nbytes > WIPE_NBYTES:
                    self._wipe(client)
            self._raise_violations(node)
        finally:
            node.stop()

    def _check_namespace(self, client: Client, index: int) -> None:
        now = time.time()
        listed = [page.prefix_hash for page in client.list_pages(NAMESPACES[index])]
        hits = check_bytes(client, index, listed) if listed else []
        found = {prefix_hash for prefix_hash, hit in zip(listed, hits, strict=True) if hit}
        self.counts["found"] += len(found)
        for known in self._known:
            durable = {h for i, h in known.durable if i == index}
            dead = {h for i, h in known.gone if i == index}
            dead |= {key[1] for key, end in known.mortal.items() if key[0] == index and end <= now}
            if back := dead & found:
                gone = len(back & {h for i, h in known.gone if i == index})
                raise Failure(
                    f"{gone} pages came back after their removal, {len(back) - gone} after "
                    "their TTL"
                )
            if self._evicting:
                continue
            if durable - found:
                raise Failure(f"{len(durable - found)} of {len(durable)} durable pages are lost")
            self.counts["durable"] += len(durable)
            self.counts["dead"] += len(dead)

    def _wipe(self, client: Client) -> None:
        for namespace in NAMESPACES:
            client.remove_namespace(namespace)
        client.flush()
        if client.node_status().disk.used_nbytes:
            raise Failure("removing all namespaces left slots in use")
        self._known = [Known() for _ in range(THREADS)]

    def _raise_violations(self, node: Node) -> None:
        if violations := node.check():
            raise Failure("; ".join(violations))


def _flag(name: str) -> str:
    return "--" + name.replace("nbytes", "bytes").replace("_", "-")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kills a node at random moments and checks what is left."
    )
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument(
        "--dir", help="parent of the data directories (default: the temporary directory)"
    )
    parser.add_argument("--encrypted", action="store_true", help="the data directory has a key")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a node in this process logs each torn page
    seed = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="kvstore-crash-", dir=arguments.dir))
    key = {"encrypt_key_file": key_file(root / "key")} if arguments.encrypted else {}
    roomy, tight = (
        Crashes(root / "roomy", seed, False, key),
        Crashes(root / "tight", seed, True, key),
    )
    started = time.monotonic()
    for number in range(arguments.cycles):
        try:
            (tight if number % 4 == 2 else roomy).cycle(number)
        except Failure as failure:
            print(f"FAILED in cycle {number}, seed {seed}, data left in {root}: {failure}")
            return 1
    counts = roomy.counts + tight.counts
    print(
        f"{counts['cycles']} cycles in {time.monotonic() - started:.0f} s, seed {seed}: "
        f"{counts['found']} pages read, "
        f"0 wrong bytes; {counts['durable']} durable pages checked, 0 lost; {counts['dead']} dead "
        "pages checked, "
        f"0 came back; 0 violations; {counts['quarantined']} torn non-durable pages dropped"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
