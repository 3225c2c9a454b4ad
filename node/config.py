"""Define all settings of a node, checked together at its start."""

from dataclasses import dataclass

from kvstore.cluster.view import REPLICAS_MAX
from kvstore.config import (
    BULK_PORT,
    GRPC_CHUNK_NBYTES,
    GRPC_PORT,
    MESSAGE_NBYTES_MAX,
    METRICS_PORT,
    check_settings,
    is_loopback,
    secret,
    setting,
)
from kvstore.errors import ConfigError
from kvstore.keys import PREFIX_HASH_NBYTES_MAX
from kvstore.layout import SLOT_ALIGN_NBYTES
from kvstore.security.identities import TENANT
from kvstore.transports.unix_sockets import check_path

GIB = 1 << 30
OFF = ("", "none")  # of an interface or a socket
DISK_EXTENT_NBYTES = 64 << 20  # one open file each: a thousand for 64 GiB
EXTENTS_WANTED = 64  # enough to follow a changing mix of page sizes, few enough to waste little


def missing(package: str) -> str:
    """Return the message for a Python package that is not installed."""
    return (
        f"the Python package {package} is not installed; a node needs the extra `node`: "
        "pip install 'kvstore-llm[node]', or the wheel's file name followed by [node]"
    )


@dataclass(frozen=True)
class NodeConfig:
    """Configuration of a node. Environment: KVSTORE_NODE_PORT, KVSTORE_NODE_RAM_BYTES, ...

    Sizes take 512MiB, 4GiB, ...
    """

    host: str = setting(
        "127.0.0.1",
        "interface to listen on; any but loopback needs TLS and identities, or insecure; none: "
        "the Unix socket only, without metrics and console",
        when="clients run on other hosts",
    )
    insecure: bool = setting(
        False,
        "admit every caller without authentication, on any interface",
        when="the network is private",
    )
    identities: str = setting(
        "",
        "file of identities and their rights (kvstore tokens); empty: no authentication",
        when="others reach the node",
    )
    identities_writable: bool = setting(
        False,
        "let administrators of all tenants replace the identities file (kvstore identities push); "
        "needs TLS, or loopback",
        when="many nodes have the same file",
    )
    shm_trust: str = setting(
        "",
        "tenants, a,b,c, that may map the RAM tier, where each can read and write every page; "
        "needs identities",
        when="engines of these tenants run on this host",
    )
    audit_log: str = setting(
        "",
        "file for refused calls and administration; empty: the log",
        when="an audit needs a file of its own",
    )
    token: str = secret("this node's token towards the other members of its cluster")
    token_file: str = setting(
        "",
        "file with this node's token for the other members; read at each connection",
        when="the cluster uses identities",
    )
    port: int = setting(GRPC_PORT, "gRPC port; 0: any free port", 0, 65535)
    bulk_port: int = setting(BULK_PORT, "port of the bulk wire; 0: any free port", 0, 65535)
    metrics_port: int = setting(
        METRICS_PORT, "HTTP port of metrics, health and console; 0: any free port", 0, 65535
    )
    console: str = setting(
        "on",
        "serve the console at /console/ of the metrics port",
        choices=("on", "off"),
        when="no browser should see it",
    )
    shm_socket: str = setting(
        "auto",
        "Unix socket of the shared-memory wire; auto: <port>.sock in $XDG_RUNTIME_DIR/kvstore or "
        "/tmp/kvstore-<uid>; none: no such wire",
        when="containers share the socket",
    )
    ram_nbytes: int = setting(
        GIB, "size of the RAM tier", SLOT_ALIGN_NBYTES, 1 << 46, when="always: see planning.md"
    )
    extent_nbytes: int = setting(
        0,
        "piece of RAM for pages of one size, and the largest page; 0: ram_nbytes/64, between "
        "16MiB and 1GiB",
        0,
        1 << 40,
        expert=True,
        when="pages are larger than that",
    )
    batch_keys_max: int = setting(4096, "keys of one request", 1, 1 << 14, expert=True)
    batch_nbytes_max: int = setting(
        0, "page bytes of one put or get; 0: ram_nbytes/4, at most 1GiB", 0, 1 << 40, expert=True
    )
    namespaces_max: int = setting(
        1024,
        "namespaces open at a time",
        1,
        2048,
        expert=True,
        when="more models or tenants share the node",
    )
    sessions_max: int = setting(
        256, "connections of each wire; one peer gets half", 1, 1 << 14, when="more engines connect"
    )
    grpc_host: str = setting(
        "",
        "interface of the gRPC port; empty: as host; none: no gRPC",
        when="administrators use another network",
    )
    grpc_processes: int = setting(
        1,
        "gateway processes, which share the gRPC port",
        1,
        64,
        when="many clients use gRPC for pages",
    )
    grpc_memory_nbytes: int = setting(
        384 << 20,
        "memory of a gateway process; it restarts above that",
        128 << 20,
        1 << 40,
        when="kvstore_gateway_ends_total counts memory",
    )
    grpc_threads: int = setting(
        32,
        "gRPC transfers at a time are three quarters of it, calls four times as many",
        4,
        1024,
        expert=True,
    )
    pin_ttl_ms_max: int = setting(
        7 * 24 * 3600 * 1000, "longest pin, in milliseconds", 1, 1 << 40, expert=True
    )
    stall_s: float = setting(
        10.0,
        "a transfer without 256 KiB in this time loses its connection",
        0.05,
        3600.0,
        expert=True,
        when="links are slower than that",
    )
    data_dir: str = setting(
        "", "directory of the disk tier; empty: RAM only", when="pages must survive a restart"
    )
    encrypt_key_file: str = setting(
        "",
        "file with the key that encrypts data_dir, 32 bytes in hex or base64, private to its "
        "owner; empty: none",
        when="others can read the disk",
    )
    encrypt_key_command: str = setting(
        "",
        "command that prints such a key at the start; empty: none",
        when="a key service keeps it",
    )
    disk_nbytes: int = setting(
        16 * GIB,
        "size of the disk tier",
        1 << 20,
        1 << 44,
        when="always with data_dir: a few percent below what is free",
    )
    disk_extent_nbytes: int = setting(
        0,
        "piece of disk for pages of one size, fixed for a data_dir; 0: as in data_dir, or the "
        "larger of 64MiB and extent_nbytes in a new one",
        0,
        1 << 40,
        expert=True,
    )
    disk_queue_nbytes: int = setting(
        0,
        "pages in RAM that wait to be written; 0: ram_nbytes/4",
        0,
        1 << 46,
        expert=True,
        when="kvstore_disk_pages_refused_total grows in bursts",
    )
    flush_s: float = setting(
        60.0,
        "time of a flush, a durable put or a stop",
        0.1,
        3600.0,
        expert=True,
        when="the disk needs more to write the RAM",
    )
    scrub_nbytes_per_s: int = setting(
        8 << 20,
        "rate of the background check of the disk; 0: none",
        0,
        1 << 40,
        when="the disk is busy",
    )
    cluster: str = setting(
        "",
        "etcd://HOST:PORT,.../NAME, or the members, static:NAME/ID=HOST:PORT[@ZONE][*WEIGHT],..., "
        "equal at all; empty: a single node",
        when="several nodes act as one store",
    )
    member: str = setting(
        "",
        "this node's id in its cluster; empty with etcd: the id in data_dir, made at the first "
        "start",
        when="a fixed list names it",
    )
    replicas: int = setting(
        0,
        "owners of a key, equal at all members; 0: as in the cluster, 1 in a new one",
        0,
        REPLICAS_MAX,
        when="a lost member must not cost pages",
    )
    advertise: str = setting(
        "",
        "host:port by which others reach its gRPC, or bulk://host:port of its bulk wire; empty: "
        "host, or the address towards etcd",
        when="the node is behind another address",
    )
    weight: float = setting(
        1.0,
        "this node's share of the keys relative to the others' (etcd)",
        0.001,
        1e6,
        when="members have unequal memory",
    )
    zone: str = setting(
        "",
        "failure domain of this node, such as its rack (etcd)",
        when="replicas must lie apart",
    )
    lease_s: int = setting(
        5,
        "seconds without contact to etcd after which a node is no member",
        1,
        300,
        expert=True,
        when="etcd is far away",
    )
    cluster_wait_s: float = setting(
        60.0, "time that a start waits for etcd", 0.0, 86400.0, expert=True
    )
    etcd_ca: str = setting(
        "", "PEM file of the authority of etcd's certificate; empty: no TLS", when="etcd uses TLS"
    )
    etcd_cert: str = setting(
        "", "PEM file of this node's certificate for etcd", when="etcd requires one"
    )
    etcd_key: str = setting("", "PEM file of its key", when="etcd requires one")
    etcd_user: str = setting(
        "", "user of etcd; the password is in KVSTORE_NODE_ETCD_PASSWORD", when="etcd has users"
    )
    etcd_password: str = secret("password of that user")
    tls_cert: str = setting(
        "",
        "PEM file of this node's certificate, for all TCP ports; empty: no TLS",
        when="others reach the network",
    )
    tls_key: str = setting("", "PEM file of its key, private to its owner", when="with tls_cert")
    tls_client_ca: str = setting(
        "",
        "PEM file of the authorities of clients' certificates, which clients must show then; "
        "empty: none",
        when="strangers reach the port",
    )
    tls_ca: str = setting(
        "",
        "PEM file of the authorities of the other members' certificates, or system; empty: "
        "tls_client_ca",
        when="members use another authority",
    )
    tls_name: str = setting(
        "",
        "name in the other members' certificates; empty: the host in their addresses",
        when="addresses of members change",
    )
    sweep_nbytes_per_s: int = setting(
        256 << 20,
        "rate of rebalancing: a member fetches pages that it owns and others have; 0: no limit",
        0,
        1 << 40,
        expert=True,
        when="the network is busy",
    )
    sweep_s: float = setting(
        3600.0,
        "time between rebalancings without a change of the view; 0: never",
        0.0,
        1e6,
        expert=True,
    )
    hand_over_queue_nbytes: int = setting(
        0,
        "pages in RAM that wait to be replicated; 0: ram_nbytes/8",
        0,
        1 << 46,
        expert=True,
        when="kvstore_peers_pages_dropped_total grows in bursts",
    )
    hand_over_nbytes_per_s: int = setting(
        0, "rate of replication; 0: no limit", 0, 1 << 40, expert=True, when="the network is busy"
    )
    copies_share: float = setting(
        0.5,
        "share of the RAM for copies of pages that other members own",
        0.01,
        1.0,
        expert=True,
        when="engines on this host read pages of others",
    )
    drain_s: float = setting(
        10.0, "time that running requests get at SIGTERM", 0.0, 3600.0, when="transfers take longer"
    )
    log_format: str = setting(
        "text",
        "lines of the log: text, or one JSON object each",
        choices=("text", "json"),
        when="a collector reads the log",
    )
    log_level: str = setting(
        "INFO",
        "least severe messages to log",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        when="a fault must be found",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.shm_socket not in ("", "auto", "none"):
            check_path(self.shm_socket, "shm_socket")
        if self.extent_nbytes == 0:
            wanted = min(max(self.ram_nbytes // EXTENTS_WANTED, 16 << 20), GIB, self.ram_nbytes)
            object.__setattr__(self, "extent_nbytes", _aligned(wanted))
        if self.batch_nbytes_max == 0:
            wanted = min(max(self.ram_nbytes // 4, self.extent_nbytes), GIB)
            object.__setattr__(self, "batch_nbytes_max", max(wanted, self.extent_nbytes))
        if self.extent_nbytes % SLOT_ALIGN_NBYTES or self.extent_nbytes > self.ram_nbytes:
            raise ConfigError(
                f"extent_nbytes={self.extent_nbytes} must be a multiple of {SLOT_ALIGN_NBYTES} "
                f"and at most ram_nbytes={self.ram_nbytes}"
            )
        # RAM is used in whole extents; a remainder would only look like capacity.
        object.__setattr__(
            self, "ram_nbytes", self.ram_nbytes // self.extent_nbytes * self.extent_nbytes
        )
        if not self.extent_nbytes <= self.batch_nbytes_max <= self.ram_nbytes:
            raise ConfigError(
                f"batch_nbytes_max={self.batch_nbytes_max} must be at least one page of the "
                f"largest size (extent_nbytes={self.extent_nbytes}) and at most "
                f"ram_nbytes={self.ram_nbytes}"
            )
        self._check_host()
        self._check_access()
        self._check_disk()
        if not self.hand_over_queue_nbytes:
            object.__setattr__(self, "hand_over_queue_nbytes", self.ram_nbytes // 8)
        if self.hand_over_queue_nbytes > self.ram_nbytes // 2:
            raise ConfigError(
                f"hand_over_queue_nbytes={self.hand_over_queue_nbytes} must be at most half of "
                f"ram_nbytes={self.ram_nbytes}: queued pages are held in RAM"
            )
        # A request of batch_keys_max keys must fit one message: 64 bytes and 2 of framing per key,
        # and 1 KiB for the rest. A reply with PageStat needs 160 bytes a key, so List has its own
        # limit.
        if self.batch_keys_max * (PREFIX_HASH_NBYTES_MAX + 2) + 1024 > MESSAGE_NBYTES_MAX:
            raise ConfigError(
                f"batch_keys_max={self.batch_keys_max} keys do not fit one message of "
                f"{MESSAGE_NBYTES_MAX} bytes"
            )
        assert GRPC_CHUNK_NBYTES + 1024 <= MESSAGE_NBYTES_MAX

    @property
    def trusted(self) -> tuple[str, ...]:
        """Return the tenants that may map the arena."""
        return tuple(filter(None, map(str.strip, self.shm_trust.split(","))))

    @property
    def insecurity(self) -> str:
        """Return what unauthenticated clients may do on this node's network; empty if nothing."""
        open_to = " and ".join(host for host in self._interfaces if not is_loopback(host))
        if not open_to:
            return ""
        if not self.identities:
            return f"anyone who reaches {open_to} may read, change and remove all pages"
        return (
            "" if self.tls_cert else f"tokens and pages cross the network of {open_to} unencrypted"
        )

    @property
    def _interfaces(self) -> list[str]:
        """Return all interfaces on which it listens: gRPC may have its own."""
        return [host for host in dict.fromkeys((self.host, self.grpc_host)) if host not in OFF]

    def _check_host(self) -> None:
        if self.host != "none":
            return
        if self.shm_socket in ("auto", *OFF):
            raise ConfigError(
                f"host=none leaves only the Unix socket, and shm_socket={self.shm_socket} names no "
                "file; set its path"
            )
        if self.cluster or self.grpc_host not in OFF:
            raise ConfigError(
                "host=none is for a single node without TCP; leave cluster and grpc_host empty"
            )

    def _check_access(self) -> None:
        if self.token and self.token_file:
            raise ConfigError("token and token_file are both set; set only one of them")
        if self.cluster.startswith("etcd://") and "@" in self.cluster:
            raise ConfigError(  # without the value
                "cluster has a user of etcd in it; set etcd_user, and the variable "
                "KVSTORE_NODE_ETCD_PASSWORD, because command lines and listed settings are public"
            )
        if self.shm_trust and not self.identities:
            raise ConfigError(
                f"shm_trust={self.shm_trust} names tenants, which only a node with identities has"
            )
        if self.identities_writable and not self.identities:
            raise ConfigError(
                "identities_writable concerns the file of identities; set identities, too"
            )
        if self.identities_writable and not (
            self.tls_cert or all(map(is_loopback, self._interfaces))
        ):
            raise ConfigError(
                "identities_writable needs TLS, because a pushed file decides who may do what: set "
                "tls_cert and tls_key, or listen on loopback only"
            )
        if any(not TENANT.fullmatch(name) for name in self.trusted):
            raise ConfigError(
                f"shm_trust={self.shm_trust} must be tenants' names, a,b,c; operators need none"
            )
        if self.insecurity and not self.insecure:
            also = f", grpc_host={self.grpc_host}," if len(self._interfaces) > 1 else ""
            raise ConfigError(
                f"host={self.host}{also} lets others reach this node without "
                "authentication: set identities, tls_cert and tls_key, or --insecure if "
                "anyone on the network may do everything"
            )

    @property
    def members_ca(self) -> str:
        """Return the authority that verifies members' certificates."""
        return self.tls_ca or self.tls_client_ca

    def _check_disk(self) -> None:
        if not self.disk_queue_nbytes:
            wanted = min(max(self.ram_nbytes // 4, self.extent_nbytes), self.ram_nbytes // 2)
            object.__setattr__(self, "disk_queue_nbytes", wanted)
        if self.data_dir and not 0 < self.disk_queue_nbytes <= self.ram_nbytes:
            raise ConfigError(
                f"disk_queue_nbytes={self.disk_queue_nbytes} must be at most "
                f"ram_nbytes={self.ram_nbytes}: queued pages are held in RAM"
            )
        if self.encrypt_key_file and self.encrypt_key_command:
            raise ConfigError(
                "encrypt_key_file and encrypt_key_command are both given; one key encrypts data_dir"
            )
        if (self.encrypt_key_file or self.encrypt_key_command) and not self.data_dir:
            raise ConfigError(
                "encrypt_key_file and encrypt_key_command are for a disk tier, and data_dir is "
                "empty; name a directory"
            )
        if self.disk_extent_nbytes % SLOT_ALIGN_NBYTES:
            raise ConfigError(
                f"disk_extent_nbytes={self.disk_extent_nbytes} must be a multiple of "
                f"{SLOT_ALIGN_NBYTES}"
            )
        explicit = self.data_dir and self.disk_extent_nbytes
        if explicit and not self.extent_nbytes <= self.disk_extent_nbytes <= self.disk_nbytes:
            raise ConfigError(
                f"disk_extent_nbytes={self.disk_extent_nbytes} must hold the largest page "
                f"(extent_nbytes={self.extent_nbytes}) and be at most "
                f"disk_nbytes={self.disk_nbytes}"
            )

    @property
    def disk_extent_of_new_dir(self) -> int:
        """Return the extent size of a new data directory; an existing one keeps its own."""
        return self.disk_extent_nbytes or min(
            max(DISK_EXTENT_NBYTES, self.extent_nbytes), _aligned(self.disk_nbytes)
        )


def _aligned(nbytes: int) -> int:
    return nbytes // SLOT_ALIGN_NBYTES * SLOT_ALIGN_NBYTES


# The groups of `--help`, and their settings, in order. They are the tables of a configuration file.
# Settings with `expert=True` are in none.
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
        "token_file",
    ),
    "etcd": ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user"),
    "security": ("insecure", "identities", "identities_writable", "shm_trust", "audit_log"),
    "TLS": ("tls_cert", "tls_key", "tls_client_ca", "tls_ca", "tls_name"),
    "limits": ("sessions_max", "drain_s"),
    "observability": ("console", "log_format", "log_level"),
}
