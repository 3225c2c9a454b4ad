"""The `Host` of an HTTP request: what keeps a page of another site from reading an open node through a browser."""

import ipaddress
from collections.abc import Collection, Iterable

TWO_HOSTS = "a request has one Host"
FOREIGN_HOST = (
    "this node asks nobody who he is, and a page of another site could call it by that name: use its address, "
    "a name without a dot, or the one that it has in its cluster"
)


def host_count(lines: Iterable[str]) -> int:
    """Return how many of these header lines are a Host. Proxies do not agree on which of two counts."""
    return sum(line.partition(":")[0].strip().lower() == "host" for line in lines)


def is_sure_host(host: str, own: Collection[str]) -> bool:
    """Whether nobody else can have made a browser believe that this node is what it calls `host`: an address, a name
    without a domain, or one of this node's own. Any other may be a stranger's, who has it point here."""
    if host.startswith("["):
        return host.partition("]")[0][1:].count(":") > 1
    name = host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name in own)
    return True
