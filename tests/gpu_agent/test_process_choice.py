"""Where agents and lookups live: processes on GPUs, threads on CPUs and where memory can not be shared."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.askers import ThreadAsker
from gpu_agent.blocks.homes import InProcess
from gpu_agent.process import choice
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
    return [None, SimpleNamespace(pool=SimpleNamespace(device=torch.device(device)))]


@pytest.mark.parametrize(
    ("device", "where", "expected"),
    [
        ("cpu", "auto", InProcess),
        ("cpu", "process", Process),
        ("cuda", "auto", Process),
        ("cuda", "threads", InProcess),
    ],
)
def test_agents_live_beside_an_engine_on_a_gpu(
    device: str, where: str, expected: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "AgentProcess", Process)
    assert isinstance(choice.home_of(places_on(device), CLIENT, CONFIG, where), expected)


def test_memory_that_can_not_be_shared_leaves_them_inside_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "AgentProcess", Refused)
    assert isinstance(choice.home_of(places_on("cuda"), CLIENT, CONFIG, "auto"), InProcess)
    assert "inside the engine's process and slow it" in caplog.text
    with pytest.raises(ConfigError, match="can not be mapped"):
        choice.home_of(places_on("cuda"), CLIENT, CONFIG, "process")


def test_lookups_live_beside_an_engine_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "AskProcess", Process)
    for on_gpu, where, expected in (
        (False, "auto", ThreadAsker),
        (True, "auto", Process),
        (True, "threads", ThreadAsker),
    ):
        assert isinstance(choice.asker_of(CLIENT, on_gpu, where), expected)
    assert "is not ready after 15 s" in caplog.text


def test_a_process_for_lookups_that_can_not_start_leaves_them_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(choice, "AskProcess", refuse)
    assert isinstance(choice.asker_of(CLIENT, True, "auto"), ThreadAsker)
    with pytest.raises(OSError, match="no more processes"):
        choice.asker_of(CLIENT, True, "process")


def test_an_interpreter_without_a_file_asks_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts without the process, and is only slower."""
    monkeypatch.setattr(sys, "executable", None)
    asker = choice.asker_of(CLIENT, True, "auto")
    assert isinstance(asker, ThreadAsker)
    asker.close()
