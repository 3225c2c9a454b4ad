"""Run `kvstore tokens`: edit the file of identities that a node's `--identities` names."""

import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, note, show_fitting
from kvstore.errors import InvalidRequest
from kvstore.security import identities
from kvstore.security.identities import Principal, expiry_text

PROBLEMS_SHOWN = 8  # a file that has more is none of identities

FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        "-f",
        envvar="KVSTORE_NODE_IDENTITIES",
        metavar="PATH",
        help="The file that the nodes read.",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the identity in logs and errors.")
]


TenantOption = Annotated[
    str,
    typer.Option(
        "--tenant", metavar="TENANT", help="Its tenant; * for an operator or a node: all tenants."
    ),
]


def add(
    run: Invocation,
    name: NameArgument,
    file: FileOption,
    tenant: TenantOption,
    role: Annotated[
        str, typer.Option("--role", metavar="read|write|node|admin", help="Its role.")
    ] = "write",
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="PATTERNS", help="Only namespaces of such models: llama-*,qwen-*."
        ),
    ] = "",
    days: Annotated[
        float | None,
        typer.Option("--days", metavar="N", help="How long it is valid; else for ever."),
    ] = None,
    certificate: Annotated[
        bool,
        typer.Option(
            "--certificate", help="NAME is the name in a client certificate; no token is made."
        ),
    ] = False,
) -> None:
    """Add an identity.

    Its token is printed once and kept nowhere: the file has its hash.

    \b
    Examples:
      kvstore tokens add engines --tenant team-a -f identities
      kvstore tokens add prometheus --tenant '*' --role read --days 365 -f identities
      kvstore tokens add gpu-7 --certificate --tenant team-a -f identities
    """
    token = "" if certificate else identities.new_token(tenant)
    fields = {
        "tenant": tenant,
        "role": role,
        "models": models,
        "expires": expiry_text(_expires_s(days)),
    }
    line = (
        identities.certificate_line(name, **fields)
        if certificate
        else identities.token_line(name, token, **fields)
    )

    def tell() -> None:
        """Print the token before the file is written, or nobody would know it."""
        if run.as_json:
            emit({"name": name, **fields} | ({"token": token} if token else {}))
        elif token:
            print(token)
        sys.stdout.flush()

    identities.add(file, line, tell)
    if not run.as_json:
        told = (
            "; this token is not shown again. Clients read it from KVSTORE_TOKEN or "
            "KVSTORE_TOKEN_FILE"
            if token
            else ""
        )
        note(f"{name} is in {file}{told}")


def list_(run: Invocation, file: FileOption) -> None:
    """List the identities, and the lines of the file that are wrong.

    Nobody's token or hash is shown.

    \b
    Examples:
      kvstore tokens list -f identities
      kvstore tokens list -f identities --json | jq '.identities[].name'
    """
    found = identities.read(file)
    known = [("token", some) for some in found.tokens.values()]
    known += [("certificate", some) for some in found.certificates.values()]
    if run.as_json:
        emit(
            {
                "identities": [_as_dict(kind, some) for kind, some in known],
                "problems": found.problems,
            }
        )
        return
    rows = [_as_dict(kind, some) for kind, some in known]
    if rows:
        show_fitting([name.upper() for name in rows[0]], [list(row.values()) for row in rows])
    else:
        note(f"{file} names nobody")
    for problem in found.problems[:PROBLEMS_SHOWN]:
        note(f"{file}, {problem}; nodes skip it")
    if len(found.problems) > PROBLEMS_SHOWN:
        note(f"{file} has {len(found.problems) - PROBLEMS_SHOWN:,} more such lines")


def revoke(run: Invocation, name: NameArgument, file: FileOption) -> int:
    """Take an identity out of the file.

    Nodes refuse it within two seconds. Exit 1 if there is none of this name.

    \b
    Examples:
      kvstore tokens revoke engines -f identities
    """
    count = identities.revoke(file, name)
    if run.as_json:
        emit({"name": name, "revoked": count})
    else:
        print(f"revoked {count} of this name in {file}")
    return ExitCode.OK if count else ExitCode.MISS


def _expires_s(days: float | None) -> float:
    if days is None:
        return math.inf
    if not 0 < days <= 36525:
        raise InvalidRequest(f"--days {days:g} must be above 0 and at most 36525")
    return time.time() + days * 86400


def _as_dict(kind: str, some: Principal) -> dict[str, Any]:
    return {
        "name": some.name,
        "kind": kind,
        "tenant": some.tenant,
        "role": some.role.name.lower(),
        "state": "expired" if some.expires_s <= time.time() else "valid",
        "expires": expiry_text(some.expires_s),
        "models": ",".join(some.models),
    }
