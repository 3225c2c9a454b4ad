"""Hosts on this machine whose networks can be cut: network namespaces on one bridge.

They need Linux and root.

    here 10.213.X.1 --- bridge --- 10.213.X.2  first host
                             \\---- 10.213.X.3  second host
"""

import contextlib
import os
import shutil
import subprocess

from node_fleet import Place

from kvstore.errors import ConfigError

PROGRAMS = {"ip": "iproute2", "iptables": "iptables"}
INSIDE = "eth0"


def missing() -> str:
    """Return what this machine lacks for network namespaces, or an empty text."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [
        f"{program} (Debian: apt-get install {package})" for program, package in PROGRAMS.items()
    ]
    lacking = [
        text
        for text, program in zip(lacking, PROGRAMS, strict=True)
        if shutil.which(program) is None
    ]
    return f"missing here: {', '.join(lacking)}" if lacking else ""


class Hosts:
    """Network namespaces, reachable from here; `places` has a Place for each.

    Raises ConfigError that says what is missing.
    """

    def __init__(self, count: int) -> None:
        if lacking := missing():
            raise ConfigError(lacking)
        self._name = f"kv{os.getpid()}"
        subnet = f"10.213.{os.getpid() % 250}"
        self.places: list[Place] = []
        try:
            _ip("link", "add", "name", self._name, "type", "bridge")
            _ip("addr", "add", f"{subnet}.1/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            for number in range(count):
                self._add(f"{self._name}h{number}", f"{subnet}.{number + 2}")
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, host: str) -> None:
        _ip("netns", "add", name)
        self.places.append(Place(host, ("ip", "netns", "exec", name)))
        _ip("link", "add", "name", name, "type", "veth", "peer", "name", INSIDE, "netns", name)
        _ip("link", "set", name, "master", self._name, "up")
        _ip("-n", name, "addr", "add", f"{host}/24", "dev", INSIDE)
        for device in (INSIDE, "lo"):
            _ip("-n", name, "link", "set", device, "up")

    def cut(self, place: Place, *others: str, hears: bool = False, speaks: bool = False) -> None:
        """Drop packets to a place unless it `hears`, and packets from it unless it `speaks`.

        With `others`, only packets from and to these addresses are dropped.
        """
        for chain, device, who, lost in (
            ("INPUT", "-i", "-s", not hears),
            ("OUTPUT", "-o", "-d", not speaks),
        ):
            if lost:
                for some in others or ("0.0.0.0/0",):
                    _run(
                        *place.inside,
                        "iptables",
                        "-A",
                        chain,
                        device,
                        INSIDE,
                        who,
                        some,
                        "-j",
                        "DROP",
                    )

    def heal(self, place: Place) -> None:
        _run(*place.inside, "iptables", "-F")

    def close(self) -> None:
        """Delete the namespaces and the bridge; no process may run there any more."""
        for place in self.places:
            with contextlib.suppress(ConfigError):
                _ip("netns", "del", place.inside[-1])
        with contextlib.suppress(ConfigError):
            _ip("link", "del", self._name)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
