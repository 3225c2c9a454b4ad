"""What `--cluster` says: nothing, a fixed list of members, or where the cluster is registered."""

import re
from collections.abc import Callable
from functools import partial

from kvstore.cluster.view import check_name
from kvstore.config import split_address
from kvstore.errors import ConfigError
from node.config import NodeConfig
from node.peers.address import instance_at
from node.peers.etcd import Access, Etcd
from node.peers.identity import Identity
from node.peers.links import known_by
from node.peers.membership import ETCD_SCHEME, Membership
from node.peers.registry import Registry, Terms
from node.peers.removals import Removals

PORT = 2379
# Of a node that registers itself: (setting, what it is if nobody set it).
NAMES = ("advertise", "zone", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user")
OF_ETCD = (("weight", 1.0), *((name, "") for name in NAMES))


def open_registry(
    config: NodeConfig,
    membership: Membership,
    remove: Callable[[bytes], None],
    settle: Callable[[], None],
    erase: Callable[[list[bytes]], None],
) -> Registry | None:
    """None for a node that is not registered. `remove`, `settle` and `erase` as `Removals` has them. Raises
    ConfigError."""
    if not config.cluster.startswith(ETCD_SCHEME):
        for name, default in OF_ETCD:
            if (value := getattr(config, name)) != default:
                raise ConfigError(f"{name}={value} is for a cluster on etcd; a fixed list says it of each member")
        return None
    endpoints, cluster = endpoints_and_name(config.cluster)
    access = Access(config.etcd_ca, config.etcd_cert, config.etcd_key, config.etcd_user, config.etcd_password)
    if config.zone:
        check_name("zone", config.zone)
    identity = Identity(config.data_dir, cluster, config.member)
    terms = Terms(config.replicas, config.lease_s, config.cluster_wait_s)
    removals = Removals(identity, remove, settle, erase)
    found = partial(instance_at, known_by=known_by(config))
    return Registry(Etcd(endpoints, access), identity, membership, terms, removals, found)


def endpoints_and_name(text: str) -> tuple[list[str], str]:
    """Of etcd://HOST:PORT,.../NAME. Raises ConfigError."""
    if "://" in text.removeprefix(ETCD_SCHEME):  # etcd's own tools take http://HOST:PORT
        bare = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://", "", text.removeprefix(ETCD_SCHEME))
        raise ConfigError(f"cluster={text!r} has a URL in it: write {ETCD_SCHEME}{bare}")
    hosts, slash, name = text.removeprefix(ETCD_SCHEME).partition("/")
    named = [host.strip() for host in hosts.split(",")]
    if not slash or not all(named):
        raise ConfigError(f"cluster={text!r} is not etcd://HOST:PORT,.../NAME")
    endpoints = [host if re.search(r":\d+$", host) else f"{host}:{PORT}" for host in named]
    for endpoint in endpoints:
        host, _ = split_address(endpoint)
        if ":" in host and not endpoint.startswith("["):
            raise ConfigError(f"{endpoint!r} is not host:port; an IPv6 address is written [::1]:{PORT}")
    check_name("the cluster", name)
    return endpoints, name
