"""Start the connectors and servers that vllm_gpu.py compares.

    none             no connector
    store            ours, with a node on this host
    offloading       vLLM's own OffloadingConnector, its tier in the engine's RAM
    lmcache          LMCacheConnectorV1, LMCache in the engine's process with its memory there
    lmcache-server   LMCacheMPConnector and `lmcache server` on this host, hits from the server's
                     memory (L1)
    lmcache-store    the same with our node as the server's L2 (docs/engines/lmcache.md): L1 is
                     cleared before a hit
    lmcache-lm       LMCacheConnectorV1 without a local cache: hits from LMCache's own remote
                     server, lm://

LMCache's have its defaults, except for sizes and ports.
"""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from ports import free_port, free_ports
from vllm_server import store_config

NAMES = ("none", "store", "offloading", "lmcache", "lmcache-server", "lmcache-store", "lmcache-lm")
START_S = 120.0
STAGING_GIB = 8  # LMCache's memory where it is only a buffer
REMOTE_SAVE_S = 6.0  # lm:// takes a few hundred megabytes a second


@dataclass(frozen=True)
class Connector:
    """A connector. `config`: vLLM's kv_transfer_config.

    `forget`: clears the other caches before a hit. `saves_s`: the longest time that saving
    continues after an answer. `skips`: whether requests can opt out.
    """

    config: dict[str, Any] | None
    forget: Callable[[], object] = lambda: None
    saves_s: float = 1.0
    skips: bool = False


def available(names: list[str]) -> list[str]:
    """Return the connectors that can run here; print which cannot."""
    lacking = (
        [name for name in names if name.startswith("lmcache")]
        if not importlib.util.find_spec("lmcache")
        else []
    )
    if lacking:
        print(
            f"LMCache is not installed here (pip install lmcache==0.5.6): no {', '.join(lacking)}",
            file=sys.stderr,
        )
    return [name for name in names if name not in lacking]


def connector(name: str, address: str, gib: int, stack: contextlib.ExitStack) -> Connector:
    """Start a connector.

    `gib`: its RAM; the node at `address` has as much. `stack` ends what is started.
    """
    if name == "none":
        return Connector(None)
    if name == "store":
        return Connector(store_config(address, revision="dummy", slow_hits="take"), skips=True)
    if name == "offloading":
        return Connector(_config("OffloadingConnector", cpu_bytes_to_use=gib << 30))
    os.environ["LMCACHE_TRACK_USAGE"] = "false"  # it would report every start to its makers
    if name == "lmcache":
        return Connector(_config("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": gib}))
    if name == "lmcache-lm":
        remote = {"lmcache.remote_url": f"lm://127.0.0.1:{stack.enter_context(_lm_server())}"}
        memory = {"lmcache.local_cpu": False, "lmcache.max_local_cpu_size": STAGING_GIB}
        return Connector(_config("LMCacheConnectorV1", **remote, **memory), saves_s=REMOTE_SAVE_S)
    behind = address if name == "lmcache-store" else None
    port, http_port = stack.enter_context(_lmcache_server(gib, behind))
    config = _config(
        "LMCacheMPConnector", **{"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    )
    return Connector(config, forget=lambda: _clear(http_port)) if behind else Connector(config)


def _config(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextlib.contextmanager
def _lm_server() -> Iterator[int]:
    port = free_port()
    with _process("lmcache.v1.server", "127.0.0.1", str(port), "cpu") as alive:
        _wait(lambda: socket.create_connection(("127.0.0.1", port)).close(), alive)
        yield port


@contextlib.contextmanager
def _lmcache_server(gib: int, address: str | None) -> Iterator[tuple[int, int]]:
    """Run LMCache's server; yield its port and its HTTP port."""
    port, http_port, metrics_port = free_ports(3)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    flags += ["--prometheus-port", str(metrics_port), "--eviction-policy", "LRU"]
    flags += ["--l1-size-gb", str(gib), "--l1-init-size-gb", str(gib)]
    if address:
        params = {
            "address": address,
            "revision": "dummy",
            "kv_format": "vllm 0.33 bf16 kv=bf16",
            "workers": 8,
        }
        form = {"module_path": "gpu_agent.engines.lmcache", "class_name": "NodeAdapter"}
        flags += [
            "--l2-adapter",
            json.dumps({"type": "plugin", "shared": True, **form, "adapter_params": params}),
        ]
    with _process("lmcache.cli.main", "server", *flags) as alive:
        _wait(
            lambda: urllib.request.urlopen(
                f"http://127.0.0.1:{http_port}/healthcheck", timeout=5.0
            ).close(),
            alive,
        )
        yield port, http_port


def _clear(http_port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{http_port}/cache/clear", b"", method="POST"
    )
    urllib.request.urlopen(request, timeout=START_S).close()


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[Callable[[], None]]:
    """Run a module; yield a function that fails if it has ended."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=said, stderr=subprocess.STDOUT
        )

        def alive() -> None:
            if process.poll() is not None:
                raise SystemExit(
                    f"{module} ended:\n{Path(f'/proc/self/fd/{said.fileno()}').read_text()[-3000:]}"
                )

        try:
            yield alive
        finally:
            process.kill()
            process.wait()


def _wait(reached: Callable[[], object], alive: Callable[[], None]) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            reached()
            return
        alive()
        if time.monotonic() > end:
            raise SystemExit(f"a server beside an engine does not answer after {START_S:g} s")
        time.sleep(0.2)
