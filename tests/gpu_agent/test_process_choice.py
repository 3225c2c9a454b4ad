"""Where agents and lookups run: in processes on GPUs, in threads on CPUs.

They also run in threads where memory can not be shared.
"""

import dataclasses
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import LocalBackend
from gpu_agent.blocks.lookups import ThreadLookups
from gpu_agent.worker import choice
from kvstore import ClientConfig, ConfigError

CLIENT, CONFIG = ClientConfig(), AgentConfig()


class Refused:
    def __init__(self, *_: Any) -> None:
        raise ConfigError("the engine's memory can not be mapped elsewhere")


class Process:
    def __init__(self, *_: Any) -> None:
        pass

    def await_ready(self, timeout_s: float) -> bool:
        return False


def places_on(device: str) -> Any:
    return [SimpleNamespace(pool=SimpleNamespace(device=torch.device(device)))]


@pytest.mark.parametrize(
    ("device", "where", "expected"),
    [
        ("cpu", "auto", LocalBackend),
        ("cpu", "process", Process),
        ("cuda", "auto", Process),
        ("cuda", "threads", LocalBackend),
    ],
)
def test_agents_run_in_a_process_on_a_gpu(
    device: str, where: str, expected: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "ProcessBackend", Process)
    assert isinstance(choice.agent_backend_for(places_on(device), CLIENT, CONFIG, where), expected)


@pytest.mark.parametrize("where", choice.WHERE)
def test_rank_without_layers_starts_no_process(where: str) -> None:
    assert isinstance(choice.agent_backend_for([], CLIENT, CONFIG, where), LocalBackend)


def test_agents_run_in_threads_if_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "ProcessBackend", Refused)
    assert isinstance(
        choice.agent_backend_for(places_on("cuda"), CLIENT, CONFIG, "auto"), LocalBackend
    )
    assert "inside the engine's process and slow it" in caplog.text
    with pytest.raises(ConfigError, match="can not be mapped"):
        choice.agent_backend_for(places_on("cuda"), CLIENT, CONFIG, "process")


def test_lookups_run_in_a_process_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "ProcessLookups", Process)
    for on_gpu, where, expected in (
        (False, "auto", ThreadLookups),
        (True, "auto", Process),
        (True, "threads", ThreadLookups),
    ):
        assert isinstance(choice.lookup_backend_for(CLIENT, on_gpu, where), expected)
    assert "is not ready after 15 s" in caplog.text


def test_lookups_run_in_threads_if_the_process_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(choice, "ProcessLookups", refuse)
    assert isinstance(choice.lookup_backend_for(CLIENT, True, "auto"), ThreadLookups)
    with pytest.raises(OSError, match="no more processes"):
        choice.lookup_backend_for(CLIENT, True, "process")


def test_lookups_run_in_threads_without_an_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sys.executable the engine still starts, only slower."""
    monkeypatch.setattr(sys, "executable", None)
    asker = choice.lookup_backend_for(CLIENT, True, "auto")
    assert isinstance(asker, ThreadLookups)
    asker.close()


@pytest.mark.parametrize("where", ["threads", "process"])
def test_unreadable_tls_file_ends_the_start(where: str, tmp_path: pathlib.Path) -> None:
    """Regression: a process that could not read it was started again and again."""
    client = dataclasses.replace(CLIENT, tls_ca=str(tmp_path / "typo.pem"))
    with pytest.raises(ConfigError, match=r"typo\.pem can not be read"):
        choice.lookup_backend_for(client, True, where)
    with pytest.raises(ConfigError, match=r"typo\.pem can not be read"):
        choice.agent_backend_for(places_on("cpu"), client, CONFIG, where)
