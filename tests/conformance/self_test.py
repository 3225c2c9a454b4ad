"""Test the suite with a connector that lies: each lie must come out wrong."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from configuration import Configuration, Store
from engine_control import EngineDied, EngineRefused
from lies import LIES, OF_ADAPTERS, OF_MEDIA, OF_STATES
from outcomes import Outcome
from plan import MODELS, Runner, run_case
from session import Session

HONEST = Configuration(
    "folder",
    {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": "folder_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": "{folder}"},
    },
)
# Cases that find lies, the likeliest first.
FINDERS = (
    "full hit",
    "partial hit",
    "adapters",
    "media",
    "boundaries",
    "aborted load",
    "preemption",
)


def models(runner: Runner, chosen: str | None) -> list[str]:
    """Return the models to lie about: with a LoRA, sounds and, where they run, states."""
    if chosen:
        return [name.strip() for name in chosen.split(",")]
    return [
        name
        for name in ("lora", "sound", "mamba2", "gated-delta")
        if not runner.lacks(MODELS[name])
    ]


def run(runner: Runner, names: Sequence[str], store: Store) -> Iterator[Outcome]:
    """Yield an outcome for the honest connector and each lie: "right" if the lie was caught."""
    folder = Path(store.names["folder"])
    for name in names:
        session, why = None, runner.lacks(MODELS[name])
        try:
            if not why:
                session = runner.session(name, ["writer"])
                assert session.plain.facts
        except (EngineRefused, EngineDied) as error:
            why = f"the engine does not run this model: {error}"
        try:
            if why or session is None:
                yield Outcome(name, "honest", "skipped", details=(why,))
                continue
            yield _honest(name, session, folder)
            for lie in LIES:
                if _shows(lie, name, session):
                    yield _caught(name, lie, session, folder)
        finally:
            if session is not None:
                session.close()


def _shows(lie: str, name: str, session: Session) -> bool:
    """Return whether a model has what the lie is about."""
    if lie in OF_STATES:
        return any("Mamba" in kind for kind in session.plain.facts["groups"])
    if lie in OF_ADAPTERS:
        return bool(session.adapters)
    return lie not in OF_MEDIA or "media" in MODELS[name].cases


def _finders(name: str, session: Session) -> list[str]:
    special = {"adapters": bool(session.adapters), "media": "media" in MODELS[name].cases}
    return [case for case in FINDERS if special.get(case, True)]


def _honest(name: str, session: Session, folder: Path) -> Outcome:
    (folder / "lie").write_text("")
    start, restored, wanted, details = time.monotonic(), 0, 0, []
    for case in _finders(name, session):
        found, _ = run_case(name, case, session)
        restored, wanted = restored + found.restored, wanted + found.wanted
        if found.outcome not in ("right", "close"):
            details.append(f"{case}: {found.outcome}, {'; '.join(found.details)}")
    outcome = "wrong" if details or not restored else "right"
    seconds = round(time.monotonic() - start, 1)
    return Outcome(name, "honest", outcome, restored, wanted, 0, seconds, tuple(details))


def _caught(name: str, lie: str, session: Session, folder: Path) -> Outcome:
    (folder / "lie").write_text(lie)
    start = time.monotonic()
    for case in _finders(name, session):
        found, _ = run_case(f"{name}, {lie}", case, session)
        if found.outcome == "wrong":
            details = (f"caught by {case}",)
            seconds = round(time.monotonic() - start, 1)
            return Outcome(name, lie, "right", found.restored, found.wanted, 0, seconds, details)
        if found.outcome == "engine died":
            return Outcome(name, lie, "engine died", details=found.details)
    return Outcome(name, lie, "wrong", details=("no case has caught this lie",))
