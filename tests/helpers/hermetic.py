"""Isolate this process's environment from the machine's and the user's settings.

tests/conftest.py imports it first. No pip or git configuration, HOME, locale, time zone, umask or
other variable that no test needs reaches the tests or the processes that they start. Installing
packages (`make setup`) is not affected.
"""

import atexit
import importlib.util
import locale
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import pytest

ENGINES = ("vllm", "sglang", "lightllm", "lmcache")
# To find programs, libraries, the processes of this session and the accelerator.
KEPT = {
    *(
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "TMPDIR",
        "USER",
        "LOGNAME",
    ),
    *("SOURCE_DATE_EPOCH", "LIGHTLLM_SRC", "HELM", "KUBECTL", "OMP_NUM_THREADS", "SEEDS", "CALLS"),
    *("FORKS", "INTERRUPTS", "WATCHDOG_S"),
}
KEPT_PREFIXES = (
    "CUDA",
    "CUPY_",
    "NVIDIA_",
    "NCCL_",
    "PYTEST_XDIST_",
    "PYTEST_CURRENT_",
    "COVERAGE_",
)
# Settings of the tests; all other KVSTORE_ variables are settings of the product. The product does
# not warn of these: OTHER_VARIABLES in kvstore/environment.py.
OWN = {
    *(
        "KVSTORE_SEED",
        "KVSTORE_RACES",
        "KVSTORE_MODEL_STEPS",
        "KVSTORE_STORM_EVENTS",
        "KVSTORE_CLUSTER_FAULTS",
        "KVSTORE_FULL_DISK",
    ),
    *(
        "KVSTORE_DIST_PYTHON",
        "KVSTORE_NODE_PYTHON",
        "KVSTORE_CHROMIUM",
        "KVSTORE_DYNAMO_PYTHON",
        "KVSTORE_AXE",
        "KVSTORE_PICTURES",
        "KVSTORE_PROMTOOL",
    ),
    *(
        "KVSTORE_PROMETHEUS",
        "KVSTORE_KUBERNETES_VALIDATE",
        "KVSTORE_KUBE_APISERVER",
        "KVSTORE_HOSTILE",
        "KVSTORE_LMCACHE_MEMORY",
    ),
}
# Never kept, not even for engines, which keep other variables.
REFUSED_PREFIXES = (
    "PIP_",
    "KVSTORE_",
    "PYTHON",
    "OTEL_",
    "GIT_",
    "XDG_CONFIG_",
    "LC_",
    "PYTEST_ADDOPTS",
)
REFUSED = {
    *(
        "LANG",
        "LANGUAGE",
        "TZ",
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "TERM",
        "CI",
    ),
    *(
        "GITHUB_ACTIONS",
        "PAGER",
        "EDITOR",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "XDG_RUNTIME_DIR",
        "XDG_DATA_HOME",
    ),
    *(
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "grpc_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ),
    *("NO_PROXY", "NO_GRPC_PROXY", "no_grpc_proxy"),
}
# The checkout may belong to another user, as in a container.
GIT_CONFIG = """[user]
name = tests
email = tests@example.org
[safe]
directory = *
"""
# Values that are set instead, in addition to those in `enter`.
SAME = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
GIVEN = {*SAME, "HOME", "KVSTORE_TESTS_HOME", "GIT_CONFIG_GLOBAL"}
CHILD_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def clean(environ: MutableMapping[str, str], has_engine: bool) -> None:
    """Remove the variables that no test needs.

    An engine keeps HOME, which has its caches and models, and its own variables.
    """
    for name in list(environ):
        if name in KEPT or name in OWN or name.startswith(KEPT_PREFIXES):
            continue
        if not has_engine or name in REFUSED or name.startswith(REFUSED_PREFIXES):
            environ.pop(name)  # includes HOME without an engine; `enter` sets another


def enter() -> None:
    """Make this process and its children independent of the user's environment."""
    if sys.flags.optimize:
        raise pytest.UsageError(
            "python runs with -O or PYTHONOPTIMIZE, which removes the asserts; unset it"
        )
    has_engine = any(importlib.util.find_spec(name) for name in ENGINES)
    user_home, home = os.environ.get("HOME", "/"), _home()
    kept_home = user_home if has_engine else home
    # Keep compiled kernels: compiling them in each session would take minutes
    if importlib.util.find_spec("cupy"):
        os.environ.setdefault("CUPY_CACHE_DIR", f"{user_home}/.cupy/kernel_cache")
    clean(os.environ, has_engine)
    os.environ |= {
        "HOME": kept_home,
        "KVSTORE_TESTS_HOME": home,
        "GIT_CONFIG_GLOBAL": f"{home}/.gitconfig",
        **SAME,
    }
    time.tzset()
    with suppress(locale.Error):  # systems without it use UTF-8 in the locale C
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.umask(0o022)
    sys.warnoptions.clear()  # set by PYTHONWARNINGS; pyproject.toml says which warnings are errors
    # `nohup`, a shell's `&` and some supervisors ignore or block signals; children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in CHILD_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _home() -> str:
    """Return an empty HOME, shared by the workers and children of this session."""
    home = os.environ.get("KVSTORE_TESTS_HOME", "")
    if home and os.environ.get("GIT_CONFIG_GLOBAL") == f"{home}/.gitconfig":
        return home
    home = tempfile.mkdtemp(prefix="kvstore-home-")
    Path(home, ".gitconfig").write_text(GIT_CONFIG)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    return home


enter()
