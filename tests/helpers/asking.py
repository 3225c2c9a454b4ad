"""What this process asks of nodes, and for whom."""

from typing import Any

import pytest

from kvstore import tracing
from kvstore.link import NodeLink
from kvstore.tracing import Trace


def traces_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[Trace | None]:
    """The current trace of each call of this process, as they come."""
    traces: list[Trace | None] = []
    run = NodeLink.run

    def noted(self: NodeLink, *arguments: Any) -> Any:
        traces.append(tracing.current())
        return run(self, *arguments)

    monkeypatch.setattr(NodeLink, "run", noted)
    return traces
