"""Run `kvstore context`: add, list, show, use and remove contexts."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.contexts import store
from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import emit, note, show_fitting
from kvstore.config import explicit_config
from kvstore.errors import InvalidRequest

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


def add(
    run: Invocation,
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Replace a context.")] = False,
) -> None:
    """Store the connection options of this command as a context.

    A context has names of files, not tokens or keys. Programs and engines do not read contexts:
    they read the environment.

    \b
    Examples:
      kvstore context add prod -a n1:7440,n2:7440 --tls-ca ca.pem --token-file prod.token
      kvstore context use prod
      kvstore --context prod cluster
    """
    store.check_name(name)
    settings = {setting: _stored(setting, value) for setting, value in run.given.items()}
    if refused := settings.keys() - set(store.FIELDS):
        raise InvalidRequest(f"a context can not have --{min(refused)}")
    if not settings:
        raise InvalidRequest("give at least one connection option, such as --address or --tls-ca")
    explicit_config(**settings)  # checks values and their combination
    with store.changed() as contexts:
        replaced = name in contexts.by_name
        if replaced and not force:
            raise InvalidRequest(f"there is a context {name} already; --force replaces it")
        contexts.by_name[name] = settings
        current = contexts.current
    for setting in store.FILES:
        file = settings.get(setting)
        if file and file != "system" and not os.path.exists(file):
            note(f"there is no file {file} yet")
    if run.as_json:
        emit({"name": name, "file": str(store.path()), "replaced": replaced})
    else:
        use = (
            ""
            if name == current
            else f"; use it with --context {name} or kvstore context use {name}"
        )
        print(f"context {name} is stored in {store.path()}{use}")


def _stored(setting: str, value: Any) -> Any:
    """Return a setting as a context has it: files by their absolute path."""
    if setting not in store.FILES or not value or value == "system":
        return value
    return os.path.abspath(Path(value).expanduser())


def list_(run: Invocation) -> int:
    """List the contexts; * marks the current one.

    Exit 1 if there is none.

    \b
    Example:
      kvstore context list
    """
    contexts = store.read()
    if run.as_json:
        known = [_as_json(contexts, name) for name in contexts.by_name]
        emit({"current": contexts.current or None, "contexts": known})
    elif contexts.by_name:
        rows = [
            (
                "*" if name == contexts.current else "",
                name,
                settings.get("address", "-"),
                "yes" if settings.get("tls_ca") else "-",
                os.path.basename(settings.get("token_file", "")) or "-",
                settings.get("tenant", "") or "-",
            )
            for name, settings in contexts.by_name.items()
        ]
        show_fitting(("", "NAME", "ADDRESS", "TLS", "TOKEN FILE", "TENANT"), rows)
    else:
        note("there are no contexts; kvstore context add makes one")
    return ExitCode.OK if contexts.by_name else ExitCode.MISS


def show(
    run: Invocation,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The context; else the one in use.")
    ] = "",
) -> None:
    """Show a context's settings.

    \b
    Examples:
      kvstore context show
      kvstore context show prod --json
    """
    contexts = store.read()
    wanted = name or run.named or contexts.current
    if not wanted or wanted == store.NONE:
        raise Failure("no context is in use; kvstore context use NAME makes one the current one")
    settings = contexts.get(wanted)
    if run.as_json:
        emit(_as_json(contexts, wanted))
        return
    print(f"context {wanted}{' (current)' if wanted == contexts.current else ''}")
    for setting, value in settings.items():
        print(f"  {setting.ljust(max(map(len, settings)))}  {value}")


def use(run: Invocation, name: NameArgument) -> None:
    """Make a context the current one, or none of them.

    \b
    Examples:
      kvstore context use prod
      kvstore context use none
    """
    with store.changed() as contexts:
        if name != store.NONE:
            contexts.get(name)
        contexts.current = "" if name == store.NONE else name
    if run.as_json:
        emit({"current": contexts.current or None})
    elif contexts.current:
        print(f"commands use the context {name} now")
    else:
        print("commands use no context now")


def remove(run: Invocation, name: NameArgument) -> None:
    """Remove a context; the files that it names stay.

    \b
    Example:
      kvstore context remove prod
    """
    with store.changed() as contexts:
        contexts.get(name)
        del contexts.by_name[name]
        was_current = contexts.current == name
        contexts.current = "" if was_current else contexts.current
    if run.as_json:
        emit({"name": name, "removed": True})
    else:
        print(f"removed {name}{'; no context is the current one now' if was_current else ''}")


def _as_json(contexts: store.Contexts, name: str) -> dict[str, Any]:
    settings = dict.fromkeys(store.FIELDS) | contexts.by_name[name]
    return {"name": name, "current": name == contexts.current, **settings}
