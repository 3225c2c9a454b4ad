"""Code that may run in a caller's thread uses `kvstore.sync` instead of leaky `threading` types.

A signal handler that raises while the main thread is inside `threading.Condition`, or a type made
of it, leaves its lock taken for ever.

One that raises inside `contextlib.ExitStack.__exit__` leaves a reference cycle: the exception's
traceback, that frame, and the exception in a local of it. The stack's content then stays until the
next garbage collection.

Such types may be used only where no signal handler runs, or where they hold nothing, each with its
reason.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# They use a Condition of Python, wait for one, as Thread.start does, or leave a cycle.
FORBIDDEN = {
    "contextlib": {"ExitStack"},
    "threading": {
        "Condition",
        "Semaphore",
        "BoundedSemaphore",
        "Event",
        "Barrier",
        "Timer",
        "Thread",
    },
    "concurrent.futures": {
        "Future",
        "ThreadPoolExecutor",
        "wait",
        "as_completed",
        "ProcessPoolExecutor",
    },
    "queue": {"Queue", "LifoQueue", "PriorityQueue"},
}
TOOLS = "tool: the main thread is the program's own, which ends with the first interrupt"
# The modules, the types that each may use, and the reason.
ALLOWED = {
    "kvstore/sync.py": (
        {"Thread", "Future"},
        "it is where these are made safe: another thread starts the thread",
    ),
    "kvstore/cluster/follower.py": (
        {"Thread"},
        "started by `run_in_helper_thread`, and waited for by an Event of kvstore.sync",
    ),
    "kvstore/transports/grpc_process.py": (
        {"Event", "ExitStack", "Thread"},
        "runs in a helper thread: `run_in_helper_thread`",
    ),
    "kvstore/transports/grpc_wire.py": (
        {"Semaphore"},
        "entered by helper threads and gRPC's: `run_in_helper_thread` in grpc_wire.py",
    ),
    "kvstore/cli/load.py": ({"ExitStack"}, TOOLS),
    "kvstore/bridge/bridge.py": ({"Queue", "Thread"}, TOOLS),
    "kvstore/bridge/http.py": ({"BoundedSemaphore", "Thread"}, TOOLS),
    "kvstore/cli/top/command.py": ({"Event", "Thread"}, TOOLS),
    "kvstore/otel.py": ({"Thread"}, "at the end of the process, to flush spans"),
    "kvstore/doctor/checks.py": ({"Event", "Thread"}, TOOLS),
    "kvstore/doctor/pages.py": ({"Condition"}, TOOLS),
    "kvstore/tools/bench.py": ({"Event", "ThreadPoolExecutor", "wait"}, TOOLS),
    "gpu_agent/transfer_path.py": (
        {"ExitStack"},
        "entered and left by threads of the agent's executors",
    ),
    "gpu_agent/engines/transformers_paged.py": (
        {"ExitStack"},
        "holds the engine's pause, nothing of the store's",
    ),
    "gpu_agent/lookup_cache.py": ({"Thread"}, "started by `run_in_helper_thread`"),
    "gpu_agent/kernels/arena_lock.py": ({"Thread"}, "started by `run_in_helper_thread`"),
}
MODULES = [
    path
    for package in ("kvstore", "gpu_agent")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "pb" not in path.parts
]


def used(source: str) -> set[str]:
    """Return the forbidden types that a module creates or calls.

    Names in annotations do no harm.
    """
    tree, names = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN:
            names |= {
                alias.asname or alias.name: alias.name
                for alias in node.names
                if alias.name in FORBIDDEN[node.module]
            }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            called = [*node.bases]
        elif isinstance(node, ast.Call):
            called = [node.func]
        else:
            continue
        for what in called:
            target = what.value if isinstance(what, ast.Subscript) else what
            text = ast.unparse(target)
            module, _, name = text.rpartition(".")
            if name in FORBIDDEN.get(module, ()):
                found.add(name)
            elif text in names:
                found.add(names[text])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_uses_no_forbidden_type(path: Path) -> None:
    allowed, reason = ALLOWED.get(str(path.relative_to(ROOT)), (set(), ""))
    found = used(path.read_text())
    extra = found - allowed
    assert not extra, (
        f"use kvstore.sync, kvstore.threads or a with statement in place of {sorted(extra)}"
    )
    assert found == allowed, f"ALLOWED lists unused types: {reason}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import threading\nthreading.Event()", {"Event"}),
        ("from threading import Condition as C\nC()", {"Condition"}),
        ("import concurrent.futures\nclass A(concurrent.futures.Future[int]): ...", {"Future"}),
        ("import threading\ndef f(stop: threading.Event) -> None: ...", set()),
        ("import threading\nthreading.Lock()", set()),
        ("import contextlib\nwith contextlib.ExitStack() as stack: ...", {"ExitStack"}),
        ("from kvstore.sync import Event\nEvent()", set()),
    ],
)
def test_sync_rule_finds_each_violation(source: str, expected: set[str]) -> None:
    assert used(source) == expected
