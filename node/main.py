"""Run a node: the command `kvstore-node`."""

import argparse
import dataclasses
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore import otel
from kvstore.config import load
from kvstore.errors import ConfigError
from node.config import NodeConfig, missing
from node.process import SeldomCollections, set_up_log

if TYPE_CHECKING:
    from node.server import Node

log = logging.getLogger(__name__)

# SIGHUP comes from a closing terminal, and must not cost pages that are in RAM only.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Packages of the extra `node` that this process imports.
EXTRA = ("cryptography", "prometheus_client", "rocksdict")
UMASK = 0o077  # file names contain tenants and prompt hashes: only the node's user may read them
# How long one thread may keep the GIL (default 5 ms). The disk writer prepares its batches in
# Python, and a get must not wait for that, nor for another tenant's flood (docs/decisions/0007,
# 0029).
SWITCH_INTERVAL_S = 0.0001

EXAMPLES = """examples:
  kvstore-node        1 GiB of RAM; ports 7440 (gRPC), 7441 (bulk), 7442 (metrics)
  kvstore-node --ram-bytes 64GiB --host 10.0.0.5
  KVSTORE_NODE_RAM_BYTES=8GiB kvstore-node --log-level DEBUG

Every flag can also be set by the environment: --ram-bytes is KVSTORE_NODE_RAM_BYTES.
KVSTORE_NODE_TOKEN and KVSTORE_NODE_ETCD_PASSWORD have no flag: command lines are public.
Settings for experts, which are not listed here: docs/operations.md, "Expert settings".
exit status: 0 stopped by SIGTERM, SIGINT or SIGHUP, 2 a setting or an installed package is unusable
"""

# The groups of `--help` and their settings, in order. `setting(expert=True)` hides one.
GROUPS = {
    "network": (
        "host",
        "port",
        "bulk_port",
        "metrics_port",
        "shm_socket",
        "grpc_host",
        "grpc_processes",
    ),
    "memory": ("ram_nbytes", "grpc_memory_nbytes"),
    "disk": (
        "data_dir",
        "disk_nbytes",
        "scrub_nbytes_per_s",
        "encrypt_key_file",
        "encrypt_key_command",
    ),
    "cluster": (
        "cluster",
        "member",
        "replicas",
        "advertise",
        "weight",
        "zone",
        "lease_s",
        "token_file",
    ),
    "etcd": ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user"),
    "security": ("insecure", "identities", "identities_writable", "shm_trust", "audit_log"),
    "TLS": ("tls_cert", "tls_key", "tls_client_ca", "tls_ca", "tls_name"),
    "limits": ("sessions_max", "drain_s"),
    "observability": ("console", "log_format", "log_level"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvstore-node",
        usage="%(prog)s [--option VALUE ...]",
        description="Storage node of kvstore: serves KV-cache pages by shared memory, bulk TCP and "
        "gRPC.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    fields = {
        field.name: field
        for field in dataclasses.fields(NodeConfig)
        if not field.metadata.get("secret")
    }
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, fields.pop(name))
    for field in fields.values():  # expert settings
        _add(parser, field)
    return parser


def _add(group: "argparse._ActionsContainer", field: "dataclasses.Field[Any]") -> None:
    """Add the flag of one setting, with default and range in its unit."""
    meta, name = field.metadata, field.name
    flag = "--" + name.replace("nbytes", "bytes").replace("_", "-")
    if field.default is False:
        group.add_argument(
            flag, nargs="?", const="true", metavar="true", help=f"{meta['help']} (default off)"
        )
        return
    limits = ""
    if meta["choices"]:
        limits = f"; {', '.join(meta['choices'])}"
    elif meta["low"] is not None:
        limits = f"; {_said(name, meta['low'])}..{_said(name, meta['high'])}"
    said = f"{meta['help']} (default {_said(name, field.default)}{limits})".replace("%", "%%")
    metavar = (
        "BYTES"
        if "nbytes" in name
        else "SECONDS"
        if name.endswith("_s")
        else name.rpartition("_")[2].upper()
    )
    group.add_argument(
        flag, dest=name, metavar=metavar, help=argparse.SUPPRESS if meta["expert"] else said
    )


def _said(name: str, value: Any) -> str:
    """Format a value with its unit, as a command line takes it."""
    if isinstance(value, str):
        return value or "empty"
    if "nbytes" in name:
        return _size(value) + ("/s" if value and name.endswith("_per_s") else "")
    return f"{value:g} s" if name.endswith("_s") else f"{value:.10g}"


def _size(nbytes: int) -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and not nbytes % (1 << shift):
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def _end_if_asked() -> None:
    """End a long start soon after a signal."""
    if asked := signal.sigpending() & set(STOP_SIGNALS):
        log.info("%s: the node ends during its start", _signal_names(asked))
        raise SystemExit(0)


def _signal_names(signals: set[signal.Signals]) -> str:
    return ", ".join(sorted(number.name for number in signals))


def _block_stop_signals() -> set[signal.Signals]:
    """Block the signals that stop a node, and return them.

    Leave SIGHUP out where it is ignored, as under nohup. A signal that is both ignored and blocked
    stays pending on Linux, so waiting for it would end a node that nohup is to keep.
    """
    signals = set(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    return signals


def _await_stop(signals: set[signal.Signals]) -> None:
    """Wait for one of the blocked `signals`.

    Afterwards SIGTERM and SIGINT end the process at once.
    """
    received = {signal.Signals(signal.sigwait(signals))}
    # One stop may send two signals: systemd sends SIGTERM and then SIGHUP, a shell and its terminal
    # each SIGHUP. The second one must not cut the drain short. So all pending signals count as one,
    # and SIGHUP is ignored.
    while (more := signal.sigtimedwait(signals, 0)) is not None:
        received.add(signal.Signals(more.si_signo))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in signals - {signal.SIGHUP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    log.info("%s: the node stops", _signal_names(received))


def _node_class() -> "type[Node]":
    """Import the node.

    Raises ConfigError if packages of the extra `node` are not installed.
    """
    try:
        from node.server import Node
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        raise ConfigError(missing(package)) from error
    return Node


def _reachable(host: str) -> str:
    """Return the host by which this machine reaches a listener on `host`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


def main() -> None:
    """Run a node until SIGTERM, SIGINT or SIGHUP; a second SIGTERM or SIGINT ends it at once."""
    # Blocked before any thread starts and waited for, instead of handled: a starting thread can
    # take a signal, and its handler then waits for a main thread that nothing wakes.
    signals = _block_stop_signals()
    os.umask(UMASK)
    arguments = vars(_parser().parse_args())
    try:
        config = load(NodeConfig, "KVSTORE_NODE", arguments)
        set_up_log(config.log_level, config.log_format)
        otel.set_up("kvstore-node")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        node = _node_class()(config, _end_if_asked, gateway_processes=True)
        SeldomCollections()
        node.start()
    except ConfigError as error:
        print(f"kvstore-node: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "thread" not in str(error):
            raise
        said = str(error) or "out of memory"
        print(
            f"kvstore-node: this process may not have what it needs: {said}; raise its limits "
            "(ulimit -a, pids and memory of the container), or give it less --ram-bytes",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    grpc = f"{_reachable(node.grpc.host)}:{node.grpc.port}" if node.grpc.port else "none"
    ports = f"grpc={grpc} bulk={node.bulk.port} metrics={node.metrics.port}"
    ports += f" shm={node.shm.path if node.shm else 'none'}"
    print(f"kvstore-node ready {ports}", flush=True)
    _await_stop(signals)
    node.stop()
    otel.flush()
    logging.shutdown()
    # A pool thread may still hang in a disk read, and Python would wait for it
    os._exit(0)


if __name__ == "__main__":
    main()
