"""Assemble a node from its parts, and start, drain and stop it."""

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kvstore
from kvstore.cluster.view import State
from kvstore.config import BULK_SCHEME, GRPC_PORT, ClientConfig, split_address
from kvstore.errors import ConfigError, KVStoreError, UnknownNamespace
from kvstore.keys import Namespace
from kvstore.security.certificates import NEAR_END_S, date
from kvstore.security.identities import Identities
from kvstore.transports.tls import check_tls
from node.auth.access import Access, FileReloader
from node.auth.audit import Audit
from node.auth.authorizer import Authorizer
from node.auth.quotas import Quotas, quota_of
from node.cluster.membership import Membership, advertised, check_address, check_listens, with_port
from node.cluster.peers import Peers
from node.cluster.registry import Registering, Registry, open_registry
from node.cluster.remote_pages import peer_credentials
from node.config import NodeConfig
from node.console.console import Console
from node.console.history import FILE_NAME as HISTORY_FILE
from node.console.history import History, latency_of
from node.disk.encryption import open_vault
from node.disk.io_process import ProcessStorage
from node.disk.scrub import Scrubber
from node.disk.small_file import SmallFile
from node.disk.tier import DiskTier
from node.events import FILE_NAME as EVENTS_FILE
from node.events import EventLog, Kind
from node.gateway.supervisor import Gateways
from node.memory.arena import Arena
from node.memory.inventory import Inventory
from node.memory.page import Namespaces
from node.memory.removal import remove_namespace
from node.memory.tenant_usage import Limits
from node.memory.tier import RamTier
from node.serving.bulk import BulkServer
from node.serving.connection import allow_descriptors
from node.serving.gateway import connections_max
from node.serving.http_server import is_trusted_host
from node.serving.metrics import MetricsServer, metrics_text
from node.serving.service import Service
from node.serving.session import Sessions
from node.serving.shm import ShmServer, default_path
from node.serving.tenants import Tenants
from node.slab import SlotAllocator
from node.systemd import http_answers
from node.tls import certificates_of

log = logging.getLogger(__name__)

# Bulk, gRPC, and shared memory, which has a socket and a pidfd, with as many again of gRPC before
# they are too many.
DESCRIPTORS_OF_SESSION = 5
_BIND_REMEDIES = {
    errno.EADDRINUSE: "; is another node running? Name other ports",
    errno.EADDRNOTAVAIL: "; name an address of this host in --host",
}
CHECKED_MAX = 100_000  # pages of a tier checked at a stop: each costs some 5 µs and 100 bytes


class Node:
    """A node, made of its parts.

        sockets -> shm_server | bulk_server | gateways -> service -> session -> RAM tier -> slots
                                                             |                                |
                                                             +---------- page bytes ----------+
                                                             arena

    The constructor takes memory and ports or raises ConfigError; `start` serves; `stop` drains.
    """

    def __init__(
        self,
        config: NodeConfig,
        pulse: Callable[[], None] = lambda: None,
        gateway_processes: bool = False,
    ) -> None:
        """Take memory and ports. Raises ConfigError.

        `pulse` is called now and then during a long start and may raise to end it. With
        `gateway_processes`, gRPC is served by processes, otherwise by a thread.
        """
        self.config = config
        self._pulse = pulse
        self._gateway_processes = gateway_processes
        self._started = False
        self.certificates = certificates_of(config)
        self.audit = Audit(config.audit_log)
        self.arena = Arena(config.ram_nbytes)
        slots = SlotAllocator(config.ram_nbytes, config.extent_nbytes)
        namespaces = Namespaces(config.namespaces_max, config.extent_nbytes)
        self.tier = RamTier(namespaces, slots, self.arena.copy, self.arena.zero, _clock_ms)
        self.quotas = Quotas()
        self.access = Access(
            config.identities, config.trusted, quota_of, config.identities_writable
        )
        self.access.on_change = self._take_quotas
        namespaces.owner_of = self.access.owner_of
        self._take_quotas(self.access.identities)
        self.quotas.listen(self._limit_ram)
        self.membership = Membership(config.cluster, config.member, config.replicas)
        if view := self.membership.view:
            check_listens(config.host, view.by_id[self.membership.member].address)
        tenants = Tenants(self.quotas, self.tier)
        self.sessions = Sessions(self.tier, config.batch_keys_max, config.batch_nbytes_max, tenants)
        self.disk = tenants.disk = self._open_disk(namespaces) if config.data_dir else None
        self.events = EventLog(self._small_file(EVENTS_FILE), lambda: self.membership.member)
        room_below = self.disk.has_room if self.disk is not None else lambda space: False
        self.peers = Peers(
            config, self.membership, self.tier, self.arena.view, room_below, self.events
        )
        gate = Authorizer(self.access, self.audit, self._described)
        self.service = Service(
            config, self.arena, self.tier, self.disk, self.sessions, self.peers, gate
        )
        self._own_hosts = self._host_names()
        self.console, looks = self._open_console()
        self._watch = FileReloader(
            [
                self.access.poll,
                self.service.feed.look,
                *([self._look_at_certificates] if self.certificates else []),
                *looks,
            ]
        )
        with contextlib.ExitStack() as undo:
            if self.disk is not None:
                undo.callback(self.disk.close)
            if self.console is not None:
                undo.callback(self.console.stop)
            self.registry = self._open_registry()
            of_gateways = config.grpc_processes * connections_max(config.grpc_threads)
            allow_descriptors(DESCRIPTORS_OF_SESSION * config.sessions_max + of_gateways)
            self._listen(config)
            undo.pop_all()

    def _look_at_certificates(self) -> None:
        assert self.certificates is not None
        self.certificates.poll()
        self.grpc.look()
        for certificate in self.certificates.status().certificates:
            left_s, end = certificate.ends_unix_s - time.time(), date(certificate.ends_unix_s)
            if left_s < NEAR_END_S:
                said = f"{certificate.setting} {'expired' if left_s <= 0 else 'expires'} on {end}"
                self.events.add_once(Kind.CERTIFICATE, "", said)

    def _described(self, digest: bytes) -> Namespace:
        return self.tier.namespace(digest).value

    def _host_names(self) -> list[str]:
        """Return the host names of this node that its operator configured."""
        view = self.membership.view
        listed = view.by_id[self.membership.member].address if view else ""
        addresses = filter(None, (self.config.advertise, listed))
        return [
            self.config.host,
            *(split_address(with_port(address, GRPC_PORT))[0] for address in addresses),
        ]

    def _trusts_host(self, host: str) -> bool:
        """Return whether to answer a request with this Host.

        With identities, a token protects the node.
        """
        return not self.access.open or is_trusted_host(host, self._own_hosts)

    def _open_console(self) -> tuple[Console | None, list[Callable[[], None]]]:
        """Return the console, None without one, and the functions to call periodically."""
        if self.config.console == "off" or self.config.host == "none":
            return None, []
        on_disk = self.disk.page_count if self.disk is not None else None
        history = History(
            Inventory(self.tier),
            on_disk,
            latency_of(self.service.traffic),
            file=self._small_file(HISTORY_FILE),
        )
        return Console(self.service, self.peers, history, self._described), [history.poll]

    def _open_registry(self) -> Registry | None:
        """Return the registry; None for a single node or one in a fixed list."""
        erasure, settle = self.service.erasure, self.service.durability.settle
        registry = open_registry(
            self.config, self.membership, self._forget_namespace, settle, erasure.catch_up
        )
        if registry is not None:
            self.membership.registry = lambda: (registry.status, registry.apart)
            self.membership.lost = lambda: registry.lost
            self.membership.forget_lost = registry.forget
            self.membership.announcer = registry.set_state
            self.service.on_removed = registry.record_removal
            erasure.cluster = registry
        return registry

    def _forget_namespace(self, digest: bytes) -> None:
        with contextlib.suppress(UnknownNamespace):
            # it may belong to a tenant that is erased
            remove_namespace(self.tier, digest, zero=True)

    def _listen(self, config: NodeConfig) -> None:
        try:
            self._open_ports(config)
        except OSError as error:
            remedy = _BIND_REMEDIES.get(error.errno or 0, "")
            raise ConfigError(
                f"can not listen on {config.host} (port={config.port}, bulk_port="
                f"{config.bulk_port}, metrics_port={config.metrics_port}): {error}{remedy}"
            ) from error

    def _open_ports(self, config: NodeConfig) -> None:
        # A start that fails leaves no port and no file behind
        with contextlib.ExitStack() as opened:
            own = self.certificates
            self.bulk = self._open_bulk(config)
            if self.bulk is not None:
                opened.callback(self.bulk.stop, 0.0)
                self.service.bulk_port = self.bulk.port
            self.grpc = Gateways(config, self.service, own, embedded=not self._gateway_processes)
            opened.callback(self.grpc.stop, 0.0)
            self.shm = self._open_shm()
            if self.shm is not None:
                self.service.shm_status = self.shm.status
                opened.callback(self.shm.stop, 0.0)
            self.metrics = self._open_metrics(config)
            opened.pop_all()
        self.service.gateway_status, self.service.gateway_ends = self.grpc.status, self.grpc.ends
        if self.bulk is not None:
            self.membership.serve_frames(self.bulk.port)
        if self.metrics is not None:
            self.service.metrics_port = self.metrics.port
        if own is not None:
            self.service.tls_status = own.status

    def _open_bulk(self, config: NodeConfig) -> BulkServer | None:
        """Listen on the bulk port; None for a node without TCP."""
        if config.host == "none":
            return None
        certificates, sessions_max = self.certificates, config.sessions_max
        return BulkServer(
            config.host, config.bulk_port, self.service, config.stall_s, sessions_max, certificates
        )

    def _open_metrics(self, config: NodeConfig) -> MetricsServer | None:
        """Serve metrics and the console; None for a node without TCP."""
        if config.host == "none":
            return None
        return MetricsServer(
            config.host,
            config.metrics_port,
            metrics_text(self.service),
            lambda: self.grpc.serving,
            self.certificates,
            self.console.respond if self.console else None,
            self._trusts_host,
        )

    def _open_shm(self) -> ShmServer | None:
        """Open the Unix socket; by default a node that cannot have one runs without."""
        config = self.config
        if config.shm_socket in ("", "none"):
            return None
        try:
            path = (
                default_path(self.grpc.port or self.service.bulk_port)
                if config.shm_socket == "auto"
                else config.shm_socket
            )
            return ShmServer(path, self.arena, self.service, config.stall_s, config.sessions_max)
        except (OSError, ConfigError) as error:
            if config.shm_socket != "auto":
                raise ConfigError(
                    f"can not listen on shm_socket={config.shm_socket}: {error}"
                ) from error
            log.warning("no shared memory: %s; set shm_socket to another path, or none", error)
            return None

    def _open_disk(self, namespaces: Namespaces) -> DiskTier:
        config = self.config
        vault = open_vault(config.encrypt_key_file, config.encrypt_key_command)
        directory = ProcessStorage(
            Path(config.data_dir),
            config.disk_nbytes,
            config.disk_extent_of_new_dir,
            self.arena.fd,
            keep_own_extents=not config.disk_extent_nbytes,
            key_mark=vault.mark,
            pulse=self._pulse,
        )
        if vault.mark:
            log.info("the disk tier is encrypted with key %s", vault.mark)
        disk = DiskTier(directory, self.arena.view, config.disk_queue_nbytes, vault=vault)
        namespaces.below_count = disk.page_count
        self.quotas.listen(partial(self._limit_disk, disk))
        started = time.monotonic()
        try:
            disk.restore(partial(namespaces.open, restored=True), self._pulse)
        except OSError as error:
            disk.stop_after_error(f"the rows can not be read: {error}")
        except BaseException:
            self._close_disk(disk)
            raise
        log.info(
            "disk tier: %d pages restored in %.1f s", disk.records.count, time.monotonic() - started
        )
        self.tier.below = disk
        self.scrubber = Scrubber(disk, config.scrub_nbytes_per_s)
        return disk

    def _small_file(self, name: str) -> SmallFile | None:
        """Return a small file in the data directory; None without a data directory."""
        return SmallFile(self.disk.directory, name) if self.disk is not None else None

    def _take_quotas(self, identities: Identities) -> None:
        self.quotas.set({tenant: quota_of(fields) for tenant, fields in identities.quotas.items()})

    def _limit_ram(self) -> None:
        of = self.quotas.of
        promised = self.quotas.reserved_total("ram_nbytes")
        self.tier.set_limits(
            lambda tenant: Limits(of(tenant).ram_nbytes, of(tenant).pins), promised
        )

    def _limit_disk(self, disk: DiskTier) -> None:
        of = self.quotas.of
        promised = self.quotas.reserved_total("disk_nbytes")
        disk.set_limits(lambda tenant: Limits(of(tenant).disk_nbytes, of(tenant).pins), promised)

    def start(self) -> None:
        """Start serving. Raises ConfigError if it cannot join its cluster."""
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        self.arena.populate(self._pulse)
        log.info(
            "RAM: %d bytes, of which %d are in huge pages",
            self.arena.nbytes,
            self.arena.huge_nbytes,
        )
        self._started = True
        if self.disk is not None:
            self.disk.on_health = self._on_disk_health
            if self.disk.stop_reason:
                self._on_disk_health(False)
            else:
                self.grpc.set_disk_healthy(True)
            self.disk.space.on_change = self._on_disk_space
            if self.disk.space.reason:
                self._on_disk_space(True, self.disk.space.reason)
            self.disk.writer.start(self.tier)
            self.scrubber.start()
        if self.registry is not None:
            self.registry.connect(self._pulse)
        if why := self.config.insecurity:
            log.warning("insecure: %s (docs/SECURITY.md)", why)
        self._watch.start()
        if self.shm is not None:
            self.shm.start()
        if self.bulk is not None:
            self.bulk.start()
        self.grpc.start(self._pulse)
        self.peers.start()
        if self.registry is not None:
            self._join(self.registry)
        self.events.add(Kind.STARTED, "", f"version {kvstore.__version__}")

    def _on_disk_health(self, healthy: bool) -> None:
        assert self.disk is not None
        self.service.feed.forget()
        self.grpc.set_disk_healthy(healthy)
        if healthy:
            self.events.add(Kind.DISK_RECOVERED, "", "the disk tier serves again")
        else:
            self.events.add(Kind.DISK_STOPPED, "", self.disk.stop_reason)

    def _on_disk_space(self, limited: bool, text: str) -> None:
        self.events.add(Kind.DISK_LIMITED if limited else Kind.DISK_GREW, "", text)

    def _join(self, registry: Registry) -> None:
        """Register this node and tell the others.

        It has joined when it has the pages that it owns (`node.cluster.rebalance`).
        """
        config = self.config
        # without gRPC, or with gRPC for administrators only
        apart = config.grpc_host not in ("", config.host)
        at = (
            (self.service.bulk_port, registry.addresses, BULK_SCHEME)
            if apart
            else (self.grpc.port, registry.addresses)
        )
        address = advertised(config.advertise, config.host, *at)
        check_address(address, self.service.instance_id, self._pulse, peer_credentials(config))
        instance, port = self.service.instance_id, self.service.bulk_port
        about = Registering(address, instance, config.weight, config.zone, State.JOINING, port)
        registry.join(about, self._pulse)

    def stop(self) -> None:
        """Drain and close: health first, then running requests for `drain_s`, then everything."""
        log.info("draining: running requests get %g s", self.config.drain_s)
        self._end()

    def _end(self) -> None:
        self.service.draining = True
        self.grpc.set_serving(False)
        if self._started:
            self.events.add(Kind.STOPPED, "", "the node stops")
        started = time.monotonic()
        if self.shm is not None:
            self.shm.stop(self.config.drain_s)
        if self.bulk is not None:
            self.bulk.stop(max(0.0, self.config.drain_s - (time.monotonic() - started)))
        self.grpc.stop(max(0.0, self.config.drain_s - (time.monotonic() - started)))
        self.peers.stop(max(0.0, self.config.drain_s - (time.monotonic() - started)))
        # after the replication of its pages: members accept them from members only
        if self.registry is not None:
            self.registry.close()
        if self.metrics is not None:
            self.metrics.stop()
        if self.console is not None:
            self.console.stop()
        if self.disk is not None and self._started:
            self._stop_disk(self.disk)
        self.events.close()
        if self.disk is not None:
            self._close_disk(self.disk)
        _tell_violations("RAM", self.tier.visible_count, self.tier.check)
        self._watch.stop()
        self.audit.close()
        self.service.close()
        self.arena.close()

    def _stop_disk(self, disk: DiskTier) -> None:
        """Write pages to disk that are in RAM only, within `flush_s`, and close the tier."""
        end = time.monotonic() + self.config.flush_s
        self.scrubber.stop()
        try:
            self.service.durability.flush(self.service.durability.begin_wait())
        except KVStoreError as error:
            log.error("not all pages are on disk: %s", error)
        disk.writer.stop(max(1.0, end - time.monotonic()))
        _tell_violations("disk", disk.records.count, disk.check)

    def _close_disk(self, disk: DiskTier) -> None:
        try:
            disk.close()
        except OSError as error:
            log.error("the rows were not closed cleanly: %s", error)

    def reload(self) -> dict[str, str]:
        """Read the identities, certificates and credentials again, and reopen the audit log.

        Return what was read, each with the reason why its previous content stays in force, or "".
        """
        config, found = self.config, {}
        if config.identities:
            for _ in range(2):  # the second one takes a file whose last line has no end
                self.access.poll()
            found["identities"] = self.access.problem
        if self.certificates is not None:
            self._look_at_certificates()
            found["certificates"] = self.certificates.problem
        if config.cluster and (config.token_file or config.tls_cert):
            found["credentials for members"] = _problem_of_peer_credentials(config)
        if config.audit_log:
            found["audit log"] = self.audit.reopen()
        return found

    def answers(self, timeout_s: float) -> bool:
        """Return whether this node still works: the RAM tier, the acceptors and the HTTP port.

        Gateways are supervised apart.
        """
        if not self.tier.lock.acquire(timeout=timeout_s):
            return False
        self.tier.lock.release()
        servers = [server for server in (self.bulk, self.shm) if server is not None]
        if not all(server.accepts for server in servers):
            return False
        tls = self.certificates is not None
        return self.metrics is None or http_answers(
            self.config.host, self.metrics.port, tls, timeout_s
        )

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return (
            self.tier.check()
            + self.peers.check()
            + self.service.hints.sessions.check()
            + (self.disk.check() if self.disk is not None else [])
        )


def _problem_of_peer_credentials(config: NodeConfig) -> str:
    """Return why connections to other members would fail; they read these files themselves."""
    try:
        check_tls(ClientConfig(**peer_credentials(config)))
    except ConfigError as error:
        return str(error)
    return ""


def _tell_violations(where: str, page_count: int, check: Callable[[], list[str]]) -> None:
    """Log violated invariants at a stop, unless checking many pages would take too long."""
    if page_count > CHECKED_MAX:
        log.info(
            "%d pages in the %s tier are not checked: more than %d", page_count, where, CHECKED_MAX
        )
        return
    for violation in check():
        log.error("inconsistent at stop: %s", violation)


def _clock_ms() -> int:
    return time.monotonic_ns() // 1_000_000
