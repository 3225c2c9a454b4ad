"""Know the environment variables of our programs, and name those that set nothing.

Reads no environment itself: `kvstore.config` does.
"""

import logging
import re
from collections.abc import Collection, Mapping

log = logging.getLogger(__name__)

# Set by Kubernetes for each Service of a pod's namespace.
_SERVICE_LINK = re.compile(
    r"KVSTORE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=.*"
    r"|KVSTORE_(\w+_)?PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)
# Variables of agents and of engines' adapters, of nodes, and of the tests
OTHER_PREFIXES = ("KVSTORE_AGENT_", "KVSTORE_NODE_", "KVSTORE_SGLANG_", "KVSTORE_TEST")
# Read by the command line, by compose files, and by the development targets
OTHER_VARIABLES = (
    "KVSTORE_CONTEXT",
    *("KVSTORE_BIND", "KVSTORE_ETCD_IMAGE", "KVSTORE_IMAGE", "KVSTORE_MEMORY_LIMIT"),
    *("KVSTORE_NAMES", "KVSTORE_SCRAPED", "KVSTORE_SEED", "KVSTORE_RACES", "KVSTORE_MODEL_STEPS"),
    *("KVSTORE_STORM_EVENTS", "KVSTORE_CLUSTER_FAULTS", "KVSTORE_DIST_PYTHON"),
    *("KVSTORE_NODE_PYTHON", "KVSTORE_CHROMIUM", "KVSTORE_PICTURES", "KVSTORE_PROMTOOL"),
    *("KVSTORE_PROMETHEUS", "KVSTORE_KUBERNETES_VALIDATE", "KVSTORE_HOSTILE"),
    *("KVSTORE_KUBE_APISERVER", "KVSTORE_LMCACHE_MEMORY", "KVSTORE_FULL_DISK"),
    *("KVSTORE_AXE", "KVSTORE_DYNAMO_PYTHON"),
)
# Of the pages' identity, which agents read (gpu_agent/options.py)
IDENTITY_VARIABLES = {
    f"KVSTORE_{name}" for name in ("TENANT", "MODEL", "REVISION", "SALT", "EPOCH")
}
_logged: set[str] = set()


def variable_of(prefix: str, name: str) -> str:
    """Return the environment variable of a setting: KVSTORE_NODE_RAM_BYTES of ram_nbytes."""
    return f"{prefix}_{name.upper()}".replace("NBYTES", "BYTES")


def is_set(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable is set, by someone else than Kubernetes."""
    return bool(environ.get(name)) and not _is_service_link(name, environ)


def _is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether Kubernetes set this variable, for a Service that is called kvstore...

    For example KVSTORE_NODE_PORT=tcp://10.0.0.7:7440, of a Service kvstore-node.
    """
    return _SERVICE_LINK.fullmatch(f"{name}={environ[name]}") is not None


def log_unknown(environ: Mapping[str, str], known: Collection[str], own: str = "") -> None:
    """Log a warning for each variable that begins with KVSTORE_ and sets nothing, once.

    Arguments as of `kvstore.config.warn_unknown_variables`.
    """
    others = tuple(prefix for prefix in OTHER_PREFIXES if prefix != own)
    for name in sorted(environ):
        if not name.startswith("KVSTORE_") or name.startswith(others) or name in _logged:
            continue
        if name in known or name in OTHER_VARIABLES or _is_service_link(name, environ):
            continue
        _logged.add(name)
        near = nearest(name, known)
        log.warning("%s sets nothing%s", name, f"; did you mean {near}?" if near else "")


def nearest(name: str, known: Collection[str]) -> str:
    """Return the known name that a misspelled one probably means; empty if none is near."""
    from difflib import get_close_matches  # seldom needed

    return next(iter(get_close_matches(name, known, 1, 0.75)), "")
