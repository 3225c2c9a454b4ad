"""Define the messages that vLLM carries between scheduler and workers.

Orders go to the workers; reports and namespaces come back.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from gpu_agent.blocks.save_plan import Report, StepOrders
from kvstore.keys import Namespace

RankId = tuple[int, ...]
RankNamespaces = list[list[Namespace]]  # of one rank: its shards of each cache group


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Handshake metadata of one rank, sent before the first step."""

    namespaces: RankNamespaces


@dataclass
class Orders(KVConnectorMetadata):
    """Orders for one step.

    `computes`: whether the step computes tokens; if not, it may be the last one for a while.
    `knows_ranks`: the scheduler has all ranks' namespaces, so workers need not report them.
    """

    orders: StepOrders
    computes: bool = True
    knows_ranks: bool = True


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Report of one rank, or of several combined.

    `namespaces`: by rank, until the scheduler has all of them.
    """

    report: Report
    namespaces: dict[RankId, RankNamespaces] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KVConnectorWorkerMetadata":
        """Add another rank's report."""
        assert isinstance(other, WorkerReport)
        self.report.add(other.report)
        self.namespaces |= other.namespaces
        return self
