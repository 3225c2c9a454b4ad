"""Stop the clock of a logger's rate limit."""

import logging

import pytest

from kvstore.log_rate import LogRate


def one_window(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all further lines of `log` fall into one window of its LogRate."""
    assert any(isinstance(rate, LogRate) for rate in log.filters)
    monkeypatch.setattr(log, "filters", [LogRate(clock=lambda: 0.0)])
