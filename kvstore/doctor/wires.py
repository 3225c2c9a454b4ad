"""Which wires to a node work from here, and why the others do not."""

import os
from collections.abc import Iterator
from dataclasses import replace

from kvstore.client import Client
from kvstore.config import parse_address
from kvstore.doctor.finding import Finding, fail, ok, remedy_of, skipped, warn
from kvstore.doctor.way import Way
from kvstore.errors import KVStoreError
from kvstore.wires.shm import socket_here

NAMES = ("shm", "bulk", "grpc")  # the best one first
IN_CONTAINERS = "docs/operations.md, Shared memory between containers"


class Wires:
    """To a node that said hello. `clients`: of the wires that work, by name; to be closed. `keep`: they stay open until
    then, with some seven descriptors."""

    def __init__(self, way: Way, keep: bool = True) -> None:
        self.way = way
        self.keep = keep
        self.clients: dict[str, Client] = {}

    def findings(self) -> Iterator[Finding]:
        yield self._shm()
        yield self._bulk()
        yield self._grpc()
        if not self.keep:
            self.close()

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def _shm(self) -> Finding:
        hello, config = self.way.hello, self.way.config
        assert hello is not None
        wrong = fail if config.wire == "shm" else warn
        if not hello.shm_socket:
            if hello.shm_refused and (self.way.is_here or config.wire == "shm"):
                return wrong("shm", hello.shm_refused, "--shm-trust of the node names tenants that may: SECURITY.md")
            if config.wire == "shm":
                return fail("shm", "the node serves none", "start it without --shm-socket none, or take another wire")
            return skipped("shm", hello.shm_refused or "the node serves none (--shm-socket none)")
        named = self.way.scheme == "unix"
        path = parse_address(self.way.address).path if named else socket_here(hello.shm_socket, config)
        try:
            os.stat(path)
        except FileNotFoundError:
            said = f"its socket {path} is not on this host"
            remedy = f"if the node runs in a container here, mount its socket and set KVSTORE_SHM_DIR: {IN_CONTAINERS}"
            if self.way.is_here or config.wire == "shm":
                return wrong("shm", said, remedy)
            return skipped("shm", f"{said}: the node is on another, or in a container")
        except OSError:
            pass  # connecting says why
        remedy = f"run as the node's user or root, or set KVSTORE_SHM_DIR; clients take TCP meanwhile: {IN_CONTAINERS}"
        problem = self._try("shm")
        return wrong("shm", problem, remedy) if problem else ok("shm", f"works, through {path}")

    def _bulk(self) -> Finding:
        hello = self.way.hello
        assert hello is not None
        if self.way.scheme == "unix":
            return skipped("bulk", "the address is that of a Unix socket")
        problem = self._try("bulk")
        if problem:
            remedy = f"open TCP port {hello.bulk_port} (--bulk-port) from here to the node; over gRPC all is slower"
            return fail("bulk", problem, remedy)
        return ok("bulk", f"works, at port {hello.bulk_port}")

    def _grpc(self) -> Finding:
        if self.way.scheme != "grpc":
            return skipped("grpc", "the address is one of frames")
        problem = self._try("grpc")
        return fail("grpc", problem, "look at the log of kvstore-node") if problem else ok("grpc", "works")

    def _try(self, wire: str) -> str:
        """Why it does not work; empty: it does."""
        config = replace(self.way.config, wire=wire, connections_max=1, page_key="", page_key_file="")
        client = Client(config)
        try:
            client.view()
        except KVStoreError as error:
            client.close()
            remedy = remedy_of(error)
            return f"{error}{'; ' * bool(remedy)}{remedy}"
        self.clients[wire] = client
        return ""
