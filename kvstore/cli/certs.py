"""Run `kvstore certs`: make certificates of nodes and clients, from an authority of one's own."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit
from kvstore.security.certificates import date

if TYPE_CHECKING:
    from kvstore.cli.authority import Authority

DirOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority and its files.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
DAYS_MAX = 36500.0


def _days(default: str) -> object:
    return typer.Option(
        "--days", metavar="DAYS", min=0.001, max=DAYS_MAX, help=f"How long it is valid ({default})."
    )


def ca(
    run: Invocation,
    folder: DirOption = Path("certs"),
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Its common name.")
    ] = "kvstore development CA",
    days: Annotated[float, _days("ten years")] = 3650.0,
    force: ForceOption = False,
) -> None:
    """Make an authority.

    Nodes and clients are given ca.pem; ca.key stays here.

    \b
    Examples:
      kvstore certs ca
      kvstore certs node node1 10.0.0.5
      kvstore certs client team-a
      kvstore-node --tls-cert certs/node1.pem --tls-key certs/node1.key \\
          --tls-client-ca certs/ca.pem
      export KVSTORE_TLS_CA=certs/ca.pem
      export KVSTORE_TLS_CERT=certs/team-a.pem KVSTORE_TLS_KEY=certs/team-a.key
      kvstore status
    """
    made = _authority().found(folder, name, days, force)
    _tell(run, made.path, made.path.with_suffix(".key"), days)


def node(
    run: Invocation,
    hosts: Annotated[
        list[str], typer.Argument(metavar="HOST", help="Its host names and addresses.")
    ],
    folder: DirOption = Path("certs"),
    file: Annotated[
        str, typer.Option("--file", metavar="NAME", help="NAME.pem, NAME.key; else the first host.")
    ] = "",
    days: Annotated[float, _days("a year")] = 365.0,
    force: ForceOption = False,
) -> None:
    """Make a node's certificate.

    To the other members of a cluster it is a client with the same one.

    Start the node with --tls-client-ca ca.pem, too: then clients without a certificate of this
    authority (kvstore certs client) fail the TLS handshake. A token identifies the client.

    \b
    Examples:
      kvstore certs node localhost 127.0.0.1 ::1 --file node
      kvstore certs node node1.example.org 10.0.0.5 --days 90
    """
    paths = _authority().open(folder).node(file or hosts[0].replace(":", "-"), hosts, days, force)
    _tell(run, *paths, days)


def client(
    run: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in the node's identities.")],
    folder: DirOption = Path("certs"),
    file: Annotated[
        str, typer.Option("--file", metavar="NAME", help="NAME.pem, NAME.key; else its name.")
    ] = "",
    days: Annotated[float, _days("a year")] = 365.0,
    force: ForceOption = False,
) -> None:
    """Make a client's certificate.

    \b
    Example:
      kvstore certs client team-a --days 30
    """
    paths = _authority().open(folder).client(file or name, name, days, force)
    _tell(run, *paths, days)


def _authority() -> "type[Authority]":
    try:
        from kvstore.cli.authority import Authority
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        said = "cryptography is not installed; pip install 'kvstore-llm[cli]'"
        raise Failure(said, ExitCode.USAGE) from error
    return Authority


def _tell(run: Invocation, certificate: Path, key: Path, days: float) -> None:
    ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    if run.as_json:
        emit(
            {"certificate": str(certificate), "key": str(key), "ends_unix_s": int(ends.timestamp())}
        )
    else:
        print(f"{certificate} and {key}, valid until {date(ends.timestamp())}")
