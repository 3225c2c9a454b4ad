"""`make fuzz`: run the same targets guided by code coverage (atheris).

    python tests/fuzz/guided.py [--inputs N] [--target NAME] [--corpus DIR] [--list]

Each target runs in a process of its own with a limited address space, until it has had its share of
the inputs. A finding is printed once per place in the code and kept in DIR/found/; the corpus of a
target is DIR/NAME/. Exits with status 1 if anything was found, with 2 if atheris is not installed.
"""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
INPUTS = 1_000_000
# Address space that a target may use beyond that at its start; no input may allocate as much
MORE_NBYTES = 1 << 30
PARSERS = ("kvstore", "node")  # packages whose coverage guides the inputs


# ---- one target, in a process of its own -----------------------------------------------------


class Run:
    """Run a target on each input, count the inputs, and exit the process after the last one."""

    def __init__(self, name: str, target: Any, watch: Any, inputs: int, folder: Path) -> None:
        self._name, self._target, self._watch = name, target, watch
        self._inputs, self._folder = inputs, folder
        self._count = 0
        self._found: dict[str, Any] = {}
        self._began = time.monotonic()

    def once(self, data: bytes) -> None:
        self._count += 1
        self._note(self._watch.run(self._target, data))
        if self._count % self._target.batch == 0 or self._count == self._inputs:
            self._note(self._watch.check(self._target, data))
        if self._count == self._inputs:
            self._write_report()
            os._exit(0)

    def _note(self, found: Any) -> None:
        if found is None or f"{found.kind} {found.where}" in self._found:
            return
        self._found[f"{found.kind} {found.where}"] = found
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{self._name} {found.kind} {found.where}")
        (self._folder / "found").mkdir(parents=True, exist_ok=True)
        (self._folder / "found" / name).write_bytes(found.data)
        print(
            f"{found.kind} of {self._name}: {found.where}\n{found.data[:400]!r}\n{found.details}",
            flush=True,
        )

    def _write_report(self) -> None:
        kinds = [found.kind for found in self._found.values()]
        report = {
            "inputs": self._count,
            "seconds": time.monotonic() - self._began,
            "found": {kind: kinds.count(kind) for kind in ("crash", "hang", "memory", "state")},
            "peak_nbytes": self._watch.peak_nbytes,
            "slowest_s": self._watch.slowest_s,
        }
        (self._folder / f"{_file(self._name)}.json").write_text(json.dumps(report))


def run_one(name: str, inputs: int, seed: int, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=list(PARSERS)):
        from registered import TARGETS
    from watched import Watch

    target = TARGETS[name]()
    corpus = folder / _file(name)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number:03}").write_bytes(data)
    allowed = _address_nbytes() + MORE_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    with Watch() as watch:
        run = Run(name, target, watch, inputs, folder)
        options = [
            f"-max_len={target.nbytes_max}",
            "-len_control=0",
            f"-seed={seed}",
            "-timeout=30",
            "-rss_limit_mb=0",
        ]
        atheris.Setup(
            [sys.argv[0], *options, "-print_final_stats=0", "-verbosity=0", str(corpus)], run.once
        )
        atheris.Fuzz()


def _address_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


# ---- all of them -----------------------------------------------------------------------------


def run_all(names: list[str], inputs: int, seed: int, folder: Path) -> bool:
    """Run all named targets and print a table; return whether there were no findings."""
    share = -(-inputs // len(names))
    print(
        f"{share:,} inputs for each of {len(names)} targets, KVSTORE_SEED={seed}, corpus and "
        f"findings in {folder}"
    )
    columns = (
        f"{'inputs':>9} {'per s':>8} {'crashes':>8} {'hangs':>6} {'memory':>7} {'state':>6} "
        f"{'peak MiB':>9}"
    )
    print(f"{'':18} {columns} {'slowest ms':>11}")
    good, total, began = True, 0, time.monotonic()
    for name in names:
        ran = _run_in_process(name, share, seed, folder)
        found = ran["found"]
        good = good and not any(found.values())
        total += ran["inputs"]
        rate = ran["inputs"] / ran["seconds"]
        print(
            f"{name:18} {ran['inputs']:9,} {rate:8,.0f} {found['crash']:8} {found['hang']:6} "
            f"{found['memory']:7} "
            f"{found['state']:6} {ran['peak_nbytes'] >> 20:9,} {ran['slowest_s'] * 1e3:11.1f}",
            flush=True,
        )
    print(f"{'all':18} {total:9,} in {time.monotonic() - began:.0f} s")
    return good


def _run_in_process(name: str, inputs: int, seed: int, folder: Path) -> Any:
    """Run one target in a process of its own; return its report.

    A process that ended without a report counts as a crash.
    """
    report = folder / f"{_file(name)}.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--inputs",
        str(inputs),
        "--corpus",
        str(folder),
    ]
    ended = subprocess.run(
        [*command, "--seed", str(seed)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    for line in ended.stdout.splitlines():
        print(f"    {line}")
    if report.exists():
        return json.loads(report.read_text())
    print(f"{name} ended with status {ended.returncode}:\n{ended.stderr[-4000:]}")
    return {
        "inputs": 0,
        "seconds": 1.0,
        "found": {"crash": 1, "hang": 0, "memory": 0, "state": 0},
        "peak_nbytes": 0,
        "slowest_s": 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--inputs", type=int, default=INPUTS, help="number of inputs of all targets together"
    )
    parser.add_argument("--target", help="run only this target")
    parser.add_argument("--corpus", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31))
    parser.add_argument("--list", action="store_true", help="print the names of all targets")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    try:
        import atheris  # noqa: F401
    except ImportError:
        print(
            "atheris is not installed (it has wheels for Linux on x86-64, Python 3.11 to 3.13); "
            "the short run of `make test` works without it",
            file=sys.stderr,
        )
        return 2
    folder = asked.corpus.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.one:
        run_one(asked.one, asked.inputs, asked.seed, folder)
        return 0
    from registered import TARGETS

    names = list(TARGETS)
    if asked.list:
        print(*names, sep="\n")
    elif asked.target and asked.target not in names:
        print(
            f"there is no target {asked.target!r}; there are: {', '.join(names)}", file=sys.stderr
        )
        return 2
    else:
        return (
            0
            if run_all([asked.target] if asked.target else names, asked.inputs, asked.seed, folder)
            else 1
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
