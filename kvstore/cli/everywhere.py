"""What is asked of every member of a cluster: what becomes of those that do not answer."""

from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.cli.exits import ExitCode, code_of
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import note
from kvstore.client import Client
from kvstore.cluster.spread import Away
from kvstore.errors import KVStoreError

Result = TypeVar("Result")


def at_each(run: Invocation, do: Callable[[Client, str], Result]) -> tuple[dict[str, Result], Away | None]:
    """What `do` returns of each member, given its id, and who raised; of a node that is alone by "", and None. Raises
    what one of them raised if all did."""
    with run.client() as client:
        view = client.view()
        if view is None:
            return {"": do(client, "")}, None
    done: dict[str, Result] = {}
    away: Away = {}
    for member in view.members:
        try:
            with Client(run.config(address=member.address, direct=True)) as client:
                done[member.id] = do(client, member.id)
        except KVStoreError as error:
            away[member.id] = error
    if not done:
        raise next(iter(away.values()))
    return done, away


def without(away: Away | None, remark: str = "") -> int:
    """Says who did not do it, and gives the exit code."""
    for member, error in (away or {}).items():
        note(f"without {member}: {error}{remark}")
    return max((code_of(error) for error in (away or {}).values()), default=ExitCode.OK)


def away_json(away: Away | None) -> dict[str, Any]:
    """Of a cluster; nothing of a node that is alone (None)."""
    return {} if away is None else {"away": sorted(away)}
