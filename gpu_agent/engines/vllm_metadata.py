"""What vLLM carries between the two roles of our connector: orders to the ranks, reports and namespaces back."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from gpu_agent.blocks.orders import Report, StepOrders
from kvstore.keys import Namespace

RankId = tuple[int, ...]
Held = list[Namespace | None]  # of one rank, per cache group


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Of one rank, before the first step."""

    namespaces: Held


@dataclass
class Orders(KVConnectorMetadata):
    """`computes`: whether requests wait for the step. `knows_ranks`: the scheduler's side knows what they hold."""

    orders: StepOrders
    computes: bool = True
    knows_ranks: bool = True


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Of one rank, or of several together. `held`: what each holds, until the scheduler's side knows."""

    report: Report
    held: dict[RankId, Held] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KVConnectorWorkerMetadata":
        assert isinstance(other, WorkerReport)
        self.report.add(other.report)
        self.held |= other.held
        return self
