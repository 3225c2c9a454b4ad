"""Check the `Host` header of HTTP requests, against DNS rebinding of a node without authentication."""

import ipaddress
from collections.abc import Collection, Iterable

DUPLICATE_HOST = "a request must not have two Host headers"
UNTRUSTED_HOST = (
    "this node has no authentication and refuses a Host that another web site could point at it: use its address, "
    "a name without a dot, or its name in the cluster"
)


def host_count(lines: Iterable[str]) -> int:
    """Return how many of these header lines are a Host. Proxies disagree on which of two is valid."""
    return sum(line.partition(":")[0].strip().lower() == "host" for line in lines)


def is_trusted_host(host: str, own: Collection[str]) -> bool:
    """Return whether `host` can not be another site's name that was pointed at this node (DNS rebinding).

    Trusted are addresses, names without a dot, and the node's own names.
    """
    if host.startswith("["):
        return host.partition("]")[0][1:].count(":") > 1
    name = host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name in own)
    return True
