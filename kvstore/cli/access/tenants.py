"""Run `kvstore tenants`: show what tenants use, and change their quotas in the identities file."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any

import typer

from kvstore.cli.access.tokens import FileOption
from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.members import answers
from kvstore.cli.output import (
    emit,
    human_nbytes,
    note,
    option_nbytes,
    percent,
    show_fitting,
)
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.results import NodeStatus
from kvstore.security import identities

REFUSED = ("puts", "pins", "holds", "connections", "requests", "bytes")
_SUMMED = (
    *("ram_nbytes", "ram_quota_nbytes", "disk_nbytes", "disk_quota_nbytes", "pin_count"),
    *("pin_quota", "held_nbytes", "held_quota_nbytes"),
    *(f"refused_{what}" for what in REFUSED),
)
COLUMNS = ("TENANT", ">RAM", ">DISK", ">SHARE", ">PAGES", ">ON DISK", ">PINS", ">HELD", "REFUSED")
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]


def _amount(flag: str, what: str) -> Any:
    return Annotated[
        str | None, typer.Option(flag, metavar="SIZE", help=f"{what} of each node; 0: no limit.")
    ]


def list_(run: Invocation) -> int:
    """Show what each tenant uses.

    RAM, disk, share of the RAM in use, pages, pins and refusals. In a cluster, these are sums over
    the members; a quota holds at each node. An identity of one tenant sees that tenant only. Exit 1
    without tenants, 3 if a member does not answer.

    \b
    Examples:
      kvstore tenants list
      kvstore tenants list --json | jq '.tenants[] | select(.refused_puts > 0)'
    """
    with run.client() as client:
        statuses = client.statuses()
    there = answers(statuses)
    if not there:
        raise next(error for error in statuses.values() if isinstance(error, KVStoreError))
    rows = tenants_json(there)
    if run.as_json:
        emit({"nodes": len(there), "tenants": rows})
    elif rows:
        show_tenants(there)
    else:
        note("no tenant has pages or a quota")
    for address, error in statuses.items():
        if isinstance(error, KVStoreError):
            note(f"without {address}: {error}")
    if len(there) < len(statuses):
        return ExitCode.UNAVAILABLE
    return ExitCode.OK if rows else ExitCode.MISS


def show_tenants(statuses: Iterable[NodeStatus]) -> None:
    """Print a table of the tenants of these nodes."""
    show_fitting(COLUMNS, [_row(tenant) for tenant in tenants_json(statuses)])


def tenants_json(statuses: Iterable[NodeStatus]) -> list[dict[str, Any]]:
    """Return each tenant's sums over the nodes, the largest user of RAM first."""
    statuses = list(statuses)
    sums: dict[str, Counter[str]] = {}
    for use in chain.from_iterable(status.tenants for status in statuses):
        total = sums.setdefault(use.tenant, Counter())
        total.update({name: getattr(use, name) for name in _SUMMED})
    for info in chain.from_iterable(status.namespaces for status in statuses):
        total = sums.setdefault(info.namespace.tenant, Counter())
        total.update(ram_pages=info.page_count, disk_pages=info.disk_page_count)
    used = sum(total["ram_nbytes"] for total in sums.values())
    names = (*_SUMMED, "ram_pages", "disk_pages")
    return [
        {
            "tenant": tenant,
            **{name: total[name] for name in names},
            "ram_share": round(total["ram_nbytes"] / used, 4) if used else 0.0,
        }
        for tenant, total in sorted(sums.items(), key=lambda one: (-one[1]["ram_nbytes"], one[0]))
    ]


def _row(use: dict[str, Any]) -> tuple[Any, ...]:
    refused = [f"{use[f'refused_{what}']:,} {what}" for what in REFUSED if use[f"refused_{what}"]]
    pins = f"{use['pin_count']:,}"
    return (
        use["tenant"],
        _beside(use["ram_nbytes"], use["ram_quota_nbytes"]),
        _beside(use["disk_nbytes"], use["disk_quota_nbytes"]),
        percent(use["ram_share"], 1.0),
        use["ram_pages"],
        use["disk_pages"],
        f"{pins} of {use['pin_quota']:,}" if use["pin_quota"] else pins,
        _beside(use["held_nbytes"], use["held_quota_nbytes"]),
        ", ".join(refused) or "-",
    )


def _beside(nbytes: int, quota_nbytes: int) -> str:
    used = human_nbytes(nbytes)
    return f"{used} of {human_nbytes(quota_nbytes)}" if quota_nbytes else used


def quota(
    run: Invocation,
    tenant: TenantArgument,
    file: FileOption,
    ram: _amount("--ram", "RAM") = None,  # type: ignore[valid-type]
    disk: _amount("--disk", "Disk") = None,  # type: ignore[valid-type]
    held: _amount("--held", "Memory held by reads") = None,  # type: ignore[valid-type]
    pins: Annotated[
        int | None, typer.Option("--pins", metavar="N", min=0, help="Pinned pages; 0: no limit.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove the tenant's quota.")] = False,
) -> None:
    """Set a tenant's quota in the identities file.

    What is not named stays. A quota holds at each node, survives restarts, and is in force within
    two seconds where nodes read this file. `kvstore identities push` gives it to the others.

    \b
    Examples:
      kvstore tenants quota team-a --ram 64GiB --disk 1TiB -f identities
      kvstore identities push identities
    """
    sizes = {"ram": ram, "disk": disk, "held": held}
    fields = {
        name: text.replace(" ", "") if option_nbytes(text, f"--{name}") else "0"
        for name, text in sizes.items()
        if text is not None
    }
    if pins is not None:
        fields["pins"] = str(pins)
    if bool(fields) == none:
        raise InvalidRequest("give --ram, --disk, --held or --pins, or --none alone")
    if not file.exists():
        raise InvalidRequest(f"there is no file {file}; kvstore tokens add makes one")
    left = identities.set_quota(file, tenant, None if none else fields)
    if run.as_json:
        values = {f"{k}_nbytes": option_nbytes(left[k], k) for k in sizes if k in left}
        emit({"tenant": tenant, "file": str(file), "quota": {**left, **values} if left else None})
    elif left:
        said = " ".join(f"{name}={value}" for name, value in left.items())
        print(f"{tenant} has the quota {said} in {file}")
    else:
        print(f"{tenant} has no quota in {file}")
