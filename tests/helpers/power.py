"""Power-loss harness: record a disk tier's file operations and check every state they may leave.

    python tests/helpers/power.py --runs 50        KVSTORE_SEED=... repeats a choice of operations

Each run has a RAM and a disk tier in this process, on a recording file layer, and `THREADS` threads
that put (durably or not), put again, remove and flush pages. Then it is killed, and a second life
continues with the same files. Alternatively there is only one life, in which some syncs fail and
lose their data.

For many moments, the files are rebuilt as a power loss may leave them (`recorded.py`). A tier opens
them, with RocksDB's own recovery. These invariants must hold:

    any page that is found               has bytes that were put under its key
    acknowledged as durable, or flushed  is found in that version or a newer one, unless removed
    removed, then flushed                is not found
    check(), rows                        report nothing

RocksDB is trusted in two points: it appends to only one log here (this is checked), and data that
it recovers when opened is synced (`test_rows_of_a_killed_run_are_in_a_synced_table`).
"""

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from lives import Failure, History, Life, Load, Stored
from recorded import Event, Image, Record, RecordingLayer

from node.disk import tier, writer
from node.disk.encryption import PLAIN, EncryptedVault
from node.disk.extents import FileLayer

THREADS, KEYS_OF_A_THREAD = 3, 12
ROOMY_NBYTES, TIGHT_NBYTES = 1 << 20, 128 << 10
LIFE_S_MAX = 20.0
FAULTS = 0.05  # share of syncs that fail


class Era(NamedTuple):
    """One life in the record, from `opened` to `ended`, and a copy of its rows."""

    opened: int
    ended: int
    rows: Path
    log_name: str


class Run:
    """One or two lives on one directory, and the power losses at moments of them."""

    def __init__(self, root: Path, seed: str, number: int) -> None:
        """Choose the kind of run by its number.

        Every fourth has a disk too small for its pages, every second has failing syncs, and every
        third is encrypted.
        """
        self._root, self._seed = root, seed
        self.rng = random.Random(seed)
        self._record = Record()
        self._evicting = number % 4 == 3
        # A second life would not know that a sync of the first one failed, so there is only one.
        self._faults, self.lives = (FAULTS, 1) if number % 2 else (0.0, 2)
        self._vault = EncryptedVault(bytes(range(32))) if number % 3 == 1 else PLAIN
        self._disk_nbytes = TIGHT_NBYTES if self._evicting else ROOMY_NBYTES
        keys = [
            self.rng.randbytes(self.rng.choice([16, 32])) for _ in range(THREADS * KEYS_OF_A_THREAD)
        ]
        self._histories = [History(key) for key in keys]
        self._eras: list[Era] = []
        self.counts: Counter[str] = Counter()

    def live(self, moments: int) -> None:
        """Run one life until the record has grown by so many moments, or for LIFE_S_MAX."""
        record, number, root = self._record, len(self._eras), self._root / "data"
        record.killed = False
        layer = RecordingLayer(record, root, f"{self._seed} {number}", self._faults)
        life = Life(root, self._disk_nbytes, layer, self._vault)
        opened, unchanged = record.now(), _contents(root / "rows")
        self._record_rows(life)
        for history in self._histories if number else []:
            version = life.look(history)
            self._check(history, version, "after a kill")
            history.done.append(Stored(version, record.now()))
        life.start()
        mine = [self._histories[i::THREADS] for i in range(THREADS)]
        loads = [
            Load(life, record, some, f"{self._seed} {number} {i}") for i, some in enumerate(mine)
        ]
        for load in loads:
            load.thread.start()
        end, end_s = record.moment + moments, time.monotonic() + LIFE_S_MAX
        while record.moment < end and time.monotonic() < end_s:
            time.sleep(0.002)
        record.killed = True
        for load in loads:
            load.thread.join()
        life.disk.writer.stop(10.0)
        rows, log_name = self._root / f"rows {number}", life.log().name
        shutil.copytree(root / "rows", rows)
        life.close()
        shutil.rmtree(root / "rows")
        shutil.copytree(rows, root / "rows")
        for load in loads:
            if load.error:
                raise Failure(f"under load: {load.error!r}") from load.error
        if _contents(rows) != unchanged:
            raise Failure("RocksDB changed more than its log, so the rebuilt files would be wrong")
        self._eras.append(Era(opened, record.now(), rows, log_name))

    def _record_rows(self, life: Life) -> None:
        record, rows = self._record, life.disk.rows
        write, sync = rows.write, rows.sync

        def recorded_write(*args: Any) -> None:
            began = record.begin(Event("rows"))
            write(*args)
            record.logs[began] = life.log().stat().st_size
            record.end(began)

        def recorded_sync() -> None:
            began = record.begin(Event("sync rows"))
            record.logs[began] = life.log().stat().st_size
            sync()
            record.end(began)

        rows.write, rows.sync = recorded_write, recorded_sync  # type: ignore[assignment, method-assign]

    def lose_power(self, count: int) -> None:
        """Check `count` power losses, spread over all lives."""
        for number in range(count):
            era = self._eras[number % len(self._eras)]
            # Prefer moments at the start of a life
            share = self.rng.random() ** self.rng.choice([1, 3])
            moment = era.opened + int(share * (era.ended - era.opened))
            target = self._root / f"image {number}"
            target.mkdir()
            image = Image(self._record, moment, self.rng)
            image.extents(target)
            image.rows(target, era.rows, era.log_name, era.opened)
            self._inspect(target, moment)
            shutil.rmtree(target)
            self.counts["images"] += 1

    def _inspect(self, target: Path, moment: int) -> None:
        life = Life(target, self._disk_nbytes, FileLayer(), self._vault)
        try:
            for history in self._histories:
                self._check(history, life.look(history), f"after a power loss at {moment}", moment)
            if wrong := life.disk.check():
                raise Failure("; ".join(wrong))
            if life.disk.counters.rows_damaged:
                raise Failure(f"{life.disk.counters.rows_damaged} damaged rows")
            self.counts["torn"] += life.disk.counters.pages_corrupt
        finally:
            life.close()

    def _check(self, history: History, version: int, when: str, moment: int | None = None) -> None:
        allowed = history.allowed(
            self._record.moment + 1 if moment is None else moment, self._evicting
        )
        if version not in allowed:
            raise Failure(
                f"{when}: version {version} under {history.key.hex()[:16]}, allowed "
                f"{sorted(allowed)}"
            )
        self.counts["found"] += version > 0
        self.counts["promised"] += 0 not in allowed
        self.counts["gone"] += allowed == {0}


def _contents(rows: Path) -> dict[str, bytes]:
    """Return RocksDB's files except its logs."""
    return {
        p.name: p.read_bytes()
        for p in rows.iterdir()
        if p.suffix != ".log" and not p.name.startswith("LOG")
    }


def play(root: Path, seed: str, number: int, moments: int, images: int) -> Counter[str]:
    """Run number `number` in `root`.

    Raises Failure, which leaves the files in `root`.
    """
    run = Run(root, f"{seed} {number}", number)
    for _ in range(run.lives):
        run.live(run.rng.randint(moments // 4, moments))
    run.lose_power(images)
    return run.counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Loses power at random moments and checks what is left."
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--images", type=int, default=100, help="power losses of each run")
    parser.add_argument(
        "--moments", type=int, default=1500, help="most recorded events of one life"
    )
    parser.add_argument(
        "--dir",
        help="where to put files (default: a temporary directory, in memory if there is one)",
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # tiers log each torn page and each kill
    writer.IDLE_S, tier.SYNC_PAGES = 0.02, 30  # so that both happen within a short life
    seed = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={seed}", flush=True)
    where = arguments.dir or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    root, counts, started = (
        Path(tempfile.mkdtemp(prefix="kvstore-power-", dir=where)),
        Counter[str](),
        time.monotonic(),
    )
    for number in range(arguments.runs):
        place = root / str(number)
        place.mkdir()
        try:
            counts += play(place, str(seed), number, arguments.moments, arguments.images)
        except Failure as failure:
            print(f"FAILED in run {number}, seed {seed}, files left in {place}: {failure}")
            return 1
        shutil.rmtree(place)
    took_s = time.monotonic() - started
    print(
        f"{counts['images']} power losses in {took_s:.0f} s, seed {seed}: {counts['found']} pages "
        "found, 0 wrong; "
        f"{counts['promised']} promised pages, 0 lost; {counts['gone']} pages gone for good, 0 "
        "came back; "
        f"{counts['torn']} torn non-durable pages dropped"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
