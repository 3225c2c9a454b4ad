"""Time that stands still for a logger's rate of lines."""

import logging

import pytest

from kvstore.log_rate import LogRate


def one_window(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `log` says from now on is said in one window of its LogRate, however slow the
    machine.
    """
    assert any(isinstance(rate, LogRate) for rate in log.filters)
    monkeypatch.setattr(log, "filters", [LogRate(clock=lambda: 0.0)])
