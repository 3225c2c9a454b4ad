"""Shell completion of namespaces and models, from the node itself. Silent and quick if it is away."""

import shlex

import typer

from kvstore.cli.invocation import Invocation
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace

TIMEOUT_S = 0.5  # a shell that waits for TAB must not hang


def complete_namespace(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    digests = [(namespace.digest.hex(), namespace.model) for namespace in _namespaces(ctx)]
    return [entry for entry in digests if entry[0].startswith(incomplete.lower())]


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those that are one plain word: others have chosen them, and the shell takes a line as it stands there."""
    models = {namespace.model for namespace in _namespaces(ctx)}
    return sorted(model for model in models if model.startswith(incomplete) and shlex.quote(model) == model)


def _namespaces(ctx: typer.Context) -> list[Namespace]:
    # Callbacks do not run while completing, so the address is taken from the words typed so far.
    address = ctx.params.get("address") or ctx.find_root().params.get("address")
    try:
        with Invocation(address, TIMEOUT_S).client() as client:
            return [namespace for namespace, _ in client.namespaces()]
    except KVStoreError:
        return []
