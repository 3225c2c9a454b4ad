"""Run a node: the command `kvstore-node`."""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import kvstore
from kvstore import otel
from kvstore.config import (
    CLIENT_VARIABLES,
    Supervisor,
    is_loopback,
    supervisor,
    variables_of,
    warn_unknown_variables,
)
from kvstore.errors import ConfigError
from kvstore.units import format_nbytes
from node.config import GROUPS, NodeConfig, missing
from node.config_file import FIELDS, KEYS, Settings, key_of, load_settings
from node.process import SeldomCollections, set_up_log
from node.systemd import Notifier, Watchdog

if TYPE_CHECKING:
    from node.server import Node

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
VARIABLES = CLIENT_VARIABLES | variables_of(NodeConfig, "KVSTORE_NODE")
FILE_HELP = "TOML file with settings; a flag or a variable comes before it"
# This process listens; it was told to stop, and its socket goes away
listening, stopping = threading.Event(), threading.Event()
# Packages of the extra `node` that this process imports.
EXTRA = ("cryptography", "prometheus_client", "rocksdict")
UMASK = 0o077  # file names contain tenants and prompt hashes: only the node's user may read them
# How long one thread may keep the GIL (default 5 ms). The disk writer prepares its batches in
# Python, and a get must not wait for that, nor for another tenant's flood (docs/decisions/0007,
# 0029).
SWITCH_INTERVAL_S = 0.0001

EXAMPLES = """examples:
  kvstore-node        1 GiB of RAM; ports 7440 (gRPC), 7441 (bulk), 7442 (metrics)
  kvstore-node --ram-bytes 64GiB --host 10.0.0.5 --insecure
  KVSTORE_NODE_RAM_BYTES=8GiB kvstore-node --log-level debug
  kvstore-node --ram-bytes 64GiB --print-config > node.toml; kvstore-node -c node.toml

Every flag can also be set by the environment: --ram-bytes is KVSTORE_NODE_RAM_BYTES.
KVSTORE_NODE_TOKEN and KVSTORE_NODE_ETCD_PASSWORD have no flag: command lines are public.
Settings for experts, which are not listed here: docs/reference/flags.md.
SIGHUP reads identities, certificates and the log level of --config again.
exit status: 0 stopped by SIGTERM or SIGINT, 2 a setting or an installed package is unusable
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as `kvstore` does."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "kvstore-node",
        allow_abbrev=False,  # a flag that is added later must not make a command line ambiguous
        usage="%(prog)s [--option VALUE ...]",
        description="Storage node of kvstore: serves KV-cache pages by shared memory, bulk TCP and "
        "gRPC.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    parser.add_argument("-c", "--config", metavar="FILE", default="", help=FILE_HELP)
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings and their sources, and end"
    )
    parser.add_argument("--json", action="store_true", help="print them as JSON")
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


def with_flags(message: str) -> str:
    """Replace the names of settings in an error by their flags: tls_cert by --tls-cert.

    A name without an underscore is an ordinary word too, so it must be followed by its value.
    """
    names = "|".join(f"{name}{'' if '_' in name else '(?==)'}" for name in FIELDS)
    return re.sub(rf"(?<![\w/.-])({names})\b", lambda found: f"--{key_of(found[0])}", message)


def _add(group: "argparse._ActionsContainer", field: "dataclasses.Field[Any]") -> None:
    """Add the flag of one setting, with default and range in its unit."""
    meta, name = field.metadata, field.name
    flag = f"--{key_of(name)}"
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
        return format_nbytes(value) + ("/s" if value and name.endswith("_per_s") else "")
    return f"{value:g} s" if name.endswith("_s") else f"{value:.10g}"


def _signal_names(signals: set[signal.Signals]) -> str:
    return ", ".join(sorted(number.name for number in signals))


def _block_signals() -> None:
    """Block the signals that a node waits for.

    SIGHUP gets its default action, which blocking suspends: nohup ignores it, and a signal that is
    ignored may be lost before `sigwait` sees it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _await_stop(reload: Callable[[], None]) -> None:
    """Wait for SIGTERM or SIGINT, and call `reload` at each SIGHUP.

    Afterwards SIGTERM and SIGINT end the process at once.
    """
    signals = {*STOP_SIGNALS, signal.SIGHUP}
    while True:
        received = {signal.Signals(signal.sigwait(signals))}
        # systemd may send SIGTERM and then SIGHUP: all pending signals count as one
        while (more := signal.sigtimedwait(signals, 0)) is not None:
            received.add(signal.Signals(more.si_signo))
        if received & set(STOP_SIGNALS):
            break
        reload()
    stopping.set()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    log.info("%s: the node stops", _signal_names(received))


class Reload:
    """Read the files of a running node again, at SIGHUP.

    A thread does it, so that a file system that hangs delays no stop. Signals that arrive meanwhile
    count as one. A file that can not be used changes nothing.
    """

    def __init__(self, node: "Node", arguments: dict[str, Any], notifier: Notifier) -> None:
        self._node = node
        self._arguments = arguments
        self._notifier = notifier
        self._level = node.config.log_level
        self._lock = threading.Lock()
        self._is_running = self._is_due = False

    def begin(self) -> None:
        """Start a reload, or have the running one repeated: it may have read files before."""
        with self._lock:
            self._is_due = True
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="reload", daemon=True).start()
        except RuntimeError:
            self._is_running = False
            log.exception("SIGHUP: nothing is reloaded: no thread can be started")

    def _run(self) -> None:
        while self._take_due():
            self._notifier.reloading()
            try:
                found = self._reload_config() | self._node.reload()
            except Exception as error:  # the supervisor waits for the end of the reload
                log.exception("SIGHUP: the reload failed")
                found = {"files": repr(error)}
            done = [what for what, problem in found.items() if not problem]
            failed = [f"{what}: {problem}" for what, problem in found.items() if problem]
            text = f"SIGHUP: reloaded {', '.join(done) or 'nothing'}"
            if failed:
                text += f"; failed, and unchanged: {'; '.join(failed)}"
            log.log(logging.WARNING if failed else logging.INFO, "%s", text)
            self._notifier.send(READY=1, STATUS=text)

    def _take_due(self) -> bool:
        """Return whether to reload; otherwise the thread ends."""
        with self._lock:
            self._is_running, self._is_due = self._is_due, False
            return self._is_running

    def _reload_config(self) -> dict[str, str]:
        """Apply the log level of the configuration file, and name changes that need a restart."""
        path = self._arguments["config"]
        if not path:
            return {}
        if not os.path.isfile(path):  # a pipe, which was read at the start
            return {"log level": f"{path} is no file that can be read again"}
        try:
            config = load_settings(self._arguments, path).config
        except ConfigError as error:
            return {"log level": str(error)}
        if config.log_level != self._level:
            self._level = config.log_level
            logging.getLogger().setLevel(self._level)
            self._node.grpc.set_log_level(self._level)
        before = dataclasses.replace(self._node.config, log_level=config.log_level)
        changed = [
            key for key, name in KEYS.items() if getattr(config, name) != getattr(before, name)
        ]
        if changed:
            log.warning("SIGHUP: %s: restart the node to apply %s", path, ", ".join(changed))
        return {f"log level {self._level}": ""}


def _node_class(config: NodeConfig) -> "type[Node]":
    """Import the node.

    Raises ConfigError if packages of the extra `node` are not installed, which it needs.
    """
    secret = config.tls_cert or config.encrypt_key_file or config.encrypt_key_command
    for package, wanted in (("rocksdict", config.data_dir), ("cryptography", secret)):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(missing(package))
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


def _listening(node: "Node") -> str:
    """Describe where a node listens, and how to open it if only this host reaches it."""
    config = node.config
    hosts = sorted({config.host, node.grpc.host} - {"none"})
    if not hosts:
        return f"listens on {config.shm_socket} only"
    bulk, http = node.service.bulk_port, node.service.metrics_port
    ports = f"gRPC {node.grpc.port or 'off'}, bulk {bulk}, HTTP {http}"
    text = f"listens on {' and '.join(hosts)} ({ports})"
    if node.shm is not None:
        text += f" and {node.shm.path}"
    if all(map(is_loopback, hosts)):
        text += (
            "; only this host can connect: for others, set --host, and --identities, --tls-cert "
            "and --tls-key, or --insecure on a private network"
        )
    return text


def _print_config(settings: Settings, as_json: bool) -> None:
    logging.shutdown()
    with contextlib.suppress(BrokenPipeError):
        print(settings.as_json() if as_json else settings.as_toml(), flush=True)
    os._exit(0)  # without another try to write to a closed pipe


def _start(config: NodeConfig, notifier: Notifier) -> "Node":
    """Start the node, unless a signal ends a long start. Raises ConfigError."""

    def pulse() -> None:
        if asked := signal.sigpending() & set(STOP_SIGNALS):
            log.info("%s: the node ends during its start", _signal_names(asked))
            raise SystemExit(0)
        notifier.starting()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    node = _node_class(config)(config, pulse, gateway_processes=True)
    SeldomCollections()
    node.start()
    return node


def main(supervised: Supervisor | None = None) -> None:
    """Run a node until SIGTERM or SIGINT; a second one ends it at once. SIGHUP reloads files.

    `supervised`: by whom; None: whom the environment names.
    """
    # Blocked before any thread starts and waited for, instead of handled: a starting thread can
    # take a signal, and its handler then waits for a main thread that nothing wakes.
    _block_signals()
    os.umask(UMASK)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have any characters
    arguments = vars(_parser().parse_args())
    supervised = supervised or supervisor()
    notifier = Notifier(supervised.socket)
    try:
        settings = load_settings(arguments, arguments["config"])
        if arguments["json"] and not arguments["print_config"]:
            raise ConfigError("--json is for --print-config; a log in JSON has --log-format json")
        config = settings.config
        set_up_log(config.log_level, config.log_format)
        warn_unknown_variables(VARIABLES, "KVSTORE_NODE_")
        if arguments["print_config"]:
            _print_config(settings, arguments["json"])
        otel.set_up("kvstore-node")
        node = _start(config, notifier)
    except ConfigError as error:
        print(f"kvstore-node: {with_flags(str(error))}", file=sys.stderr)
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
    ports = f"grpc={grpc} bulk={node.service.bulk_port} metrics={node.service.metrics_port}"
    ports += f" shm={node.shm.path if node.shm else 'none'}"
    listening.set()
    log.info("%s", _listening(node))
    print(f"kvstore-node ready {ports}", flush=True)
    notifier.send(READY=1, STATUS=_listening(node))
    watchdog = Watchdog(notifier, supervised.watchdog_s, node.answers)
    _await_stop(Reload(node, arguments, notifier).begin)
    watchdog.stop()
    notifier.send(STOPPING=1, STATUS="draining")
    node.stop()
    otel.flush()
    logging.shutdown()
    # A pool thread may still hang in a disk read, and Python would wait for it
    os._exit(0)


if __name__ == "__main__":
    main()
