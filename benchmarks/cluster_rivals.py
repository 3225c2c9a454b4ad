"""Measure three of our nodes beside Mooncake Store (two segments, TCP) and Redis Cluster.

1. Put and get of 16 pages a call, the contenders in turns; the bytes that come back are compared.
2. 96 pages of 1 MiB are put, then one server is killed. For 20 s batches of them are got and new
   ones are put. `back at first` and `at last`: of 96 pages, in the first round and the last; `puts
   well after`: seconds until all later batches of new pages were stored.

Each deadline is 1 s where the store has one. Our checksums are on; neither rival has any. If a
pipeline of redis-py raises, its commands are sent one by one.

    python -m venv .venv-rivals
    .venv-rivals/bin/pip install -e '.[node]' mooncake-transfer-engine-non-cuda 'redis[hiredis]'
    .venv-rivals/bin/python benchmarks/cluster_rivals.py [--rounds 5] [--json]

A rival that is not installed is left out.
"""

import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from measure import Report, median, parser, progress, rounds, timed
from rival_stores import Mooncake, Ours, RedisCluster, rivals_missing

BATCH = 16
TURN = 3  # calls each way, of which the first does not count
PAGE_MIB = (1, 4)
RAM_NBYTES = 768 << 20  # of each server
KEPT_BATCHES = 6
WATCHED_S = 20.0
Make = Callable[[int, int], Any]


def contenders(lacking: dict[str, str]) -> dict[str, Make]:
    """Return the stores that can run here."""
    found: dict[str, Make] = {"kvstore": Ours, "Mooncake": Mooncake, "Redis Cluster": RedisCluster}
    return {name: make for name, make in found.items() if name.split()[0] not in lacking}


def batch_of(nbytes: int) -> list[bytearray]:
    """Return random pages."""
    return [bytearray(secrets.token_bytes(nbytes)) for _ in range(BATCH)]


def keys_of(count: int) -> list[bytes]:
    """Return random keys."""
    return [secrets.token_bytes(32) for _ in range(count)]


class Turns:
    """Puts and gets of one contender."""

    def __init__(self, store: Any, nbytes: int) -> None:
        self._store = store
        self._pages, self._buffers = batch_of(nbytes), [bytearray(nbytes) for _ in range(BATCH)]

    def __call__(self) -> dict[str, list[float]]:
        """Run one turn and return the seconds of its calls."""
        seconds: dict[str, list[float]] = {"put": [], "get": []}
        for _ in range(TURN):
            keys, taken, back = keys_of(BATCH), [], []
            seconds["put"].append(
                timed(
                    lambda keys=keys, taken=taken: taken.extend(self._store.put(keys, self._pages))
                )
            )
            for buffer in self._buffers:
                buffer[:] = bytes(len(buffer))
            seconds["get"].append(
                timed(
                    lambda keys=keys, back=back: back.extend(self._store.get(keys, self._buffers))
                )
            )
            assert all(taken), f"{taken.count(False)} of {BATCH} pages were not taken"
            assert all(back), f"{back.count(False)} of {BATCH} pages did not come back"
            assert self._buffers == self._pages, (
                "the bytes that came back are not those that were put"
            )
            self._store.forget(keys)
        return {way: values[1:] for way, values in seconds.items()}


def speeds(
    makes: dict[str, Make], mib: int, count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Measure throughput of all stores."""
    nbytes = mib << 20
    stores = {name: make(nbytes, RAM_NBYTES) for name, make in makes.items()}
    try:
        samples = rounds(
            {name: Turns(store, nbytes) for name, store in stores.items()}, count, 1, tick
        )
    finally:
        for store in stores.values():
            store.close()
    shown = []
    for name, found in samples.items():
        gb = BATCH * nbytes / 1e9
        row: dict[str, Any] = {"page MiB": mib, "store": name}
        for way in ("put", "get"):
            row[f"{way} GB/s"] = round(gb / median(found[way]), 2)
            row[f"{way}, kvstore is"] = round(
                median(found[way]) / median(samples["kvstore"][way]), 2
            )
        shown.append(row)
    return shown


class Watch:
    """Results, errors and times of calls."""

    def __init__(self) -> None:
        self.raised = 0
        self.longest_s = 0.0

    def __call__(self, call: Callable[[], list[bool]]) -> list[bool]:
        """Make a call and note how long it took."""
        start = time.monotonic()
        try:
            return call()
        except Exception:  # noqa: BLE001 -- whatever a rival raises
            self.raised += 1
            return [False] * BATCH
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - start)


def killed(name: str, store: Any, kill: Callable[[], None]) -> dict[str, Any]:
    """Measure what is lost when a server is killed."""
    pages, buffers = batch_of(1 << 20), [bytearray(1 << 20) for _ in range(BATCH)]
    kept = [keys_of(BATCH) for _ in range(KEPT_BATCHES)]
    assert all(all(store.put(keys, pages)) for keys in kept)
    kill()
    watch, start, well = Watch(), time.monotonic(), None
    back: list[int] = []
    wrong = 0
    while time.monotonic() - start < WATCHED_S:
        back.append(0)
        for keys in kept:
            hits = watch(lambda keys=keys: store.get(keys, buffers))
            back[-1] += sum(hits)
            wrong += sum(
                hit and buffer != page
                for hit, buffer, page in zip(hits, buffers, pages, strict=True)
            )
        fresh = keys_of(BATCH)
        taken = all(watch(lambda keys=fresh: store.put(keys, pages)))
        well = (time.monotonic() - start if well is None else well) if taken else None
        time.sleep(0.2)
    return {
        "store, what was killed": name,
        "back at first": back[0],
        "at last": back[-1],
        "wrong": wrong,
        "calls that raised": watch.raised,
        "longest call s": round(watch.longest_s, 2),
        "puts well after s": "never" if well is None else round(well, 1),
    }


def kills(lacking: dict[str, str], replicas: int) -> list[dict[str, Any]]:
    """Run all scenes with kills."""
    nbytes = 1 << 20
    scenes: dict[str, tuple[str, Callable[[], Any], str]] = {
        "kvstore, R=1, a node": ("kvstore", lambda: Ours(nbytes, RAM_NBYTES), "kill"),
        f"kvstore, R={replicas}, a node": (
            "kvstore",
            lambda: Ours(nbytes, RAM_NBYTES, replicas),
            "kill",
        ),
        "Mooncake, a segment": ("Mooncake", lambda: Mooncake(nbytes, RAM_NBYTES), "kill"),
        "Mooncake, the master": ("Mooncake", lambda: Mooncake(nbytes, RAM_NBYTES), "kill_master"),
        "Redis Cluster, a server": (
            "Redis Cluster",
            lambda: RedisCluster(nbytes, RAM_NBYTES),
            "kill",
        ),
        "the same, full coverage off": (
            "Redis Cluster",
            lambda: RedisCluster(nbytes, RAM_NBYTES, False),
            "kill",
        ),
    }
    shown = []
    for name, (rival, make, how) in scenes.items():
        if rival.split()[0] not in lacking:
            store = make()
            try:
                shown.append(killed(name, store, getattr(store, how)))
            finally:
                store.close()
    return shown


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    options.add_argument(
        "--replicas", type=int, default=2, help="of ours, in a second row (%(default)s)"
    )
    args = options.parse_args(argv)
    lacking = rivals_missing()
    notes = [f"{name} is left out; missing here: {what}" for name, what in lacking.items()]
    command = " ".join(["python benchmarks/cluster_rivals.py", *argv])
    moved = Report(f"Put and get of {BATCH} pages, three servers", command, [*notes])
    lost = Report("One server is killed: 96 pages of 1 MiB, watched for 20 s", command, notes)
    makes = contenders(lacking)
    with progress(len(PAGE_MIB) * (args.rounds + 1)) as tick:
        for mib in PAGE_MIB:
            moved.rows += speeds(makes, mib, args.rounds, tick)
    moved.notes.append(f"medians of {args.rounds} rounds of {TURN - 1} calls")
    moved.show(args.json)
    print()
    lost.rows = kills(lacking, args.replicas)
    lost.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
