"""Record the trace context of this process's calls to nodes."""

from typing import Any

import pytest

from kvstore import tracing
from kvstore.tracing import Trace
from kvstore.transports.channel import NodeChannel


def traces_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[Trace | None]:
    """Return a list that collects the current trace of each call of this process."""
    traces: list[Trace | None] = []
    run = NodeChannel.run

    def noted(self: NodeChannel, *arguments: Any) -> Any:
        traces.append(tracing.current())
        return run(self, *arguments)

    monkeypatch.setattr(NodeChannel, "run", noted)
    return traces
