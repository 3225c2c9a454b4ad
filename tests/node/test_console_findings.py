"""Findings for an operator: each problem in a node's status gives one."""

import pytest

from kvstore import Namespace, opaque_layout
from kvstore.doctor.checks import FindingState
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from node.console.snapshot import COMPARED_MAX, findings

WELL = pb.NodeStatusReply(
    state="SERVING",
    ram=pb.RamStatus(capacity_nbytes=1 << 30),
    disk=pb.DiskStatus(state="SERVING", direct_io=True, queue_nbytes_max=1),
    peers=pb.PeersStatus(registry="etcd"),
)


def changed(**fields: object) -> pb.NodeStatusReply:
    status = pb.NodeStatusReply()
    status.CopyFrom(WELL)
    status.MergeFrom(pb.NodeStatusReply(**fields))  # type: ignore[arg-type]
    return status


def test_healthy_node_has_no_findings() -> None:
    assert findings(WELL) == []
    assert findings(pb.NodeStatusReply(state="SERVING")) == [], (
        "a tenant's status has neither RAM nor members"
    )


def test_console_findings_cover_the_largest_namespaces() -> None:
    status = pb.NodeStatusReply(state="SERVING")
    for number in range(2 * COMPARED_MAX):
        space = Namespace(f"model-{number}", opaque_layout(4096))
        counters = pb.Counters(pages_asked=number + 1, miss_absent=number + 1)
        status.namespaces.add(
            namespace=namespace_message(space), digest=space.digest, counters=counters
        )
    found = findings(status)
    assert len(found) == COMPARED_MAX
    assert all(
        f"model-{2 * COMPARED_MAX - 1 - place} " in finding.found
        for place, finding in enumerate(found)
    )


@pytest.mark.parametrize(
    ("status", "state", "text"),
    [
        (changed(state="DRAINING"), FindingState.WARN, "DRAINING"),
        (changed(insecure="anybody may write"), FindingState.WARN, "anybody may write"),
        (changed(disk=pb.DiskStatus(state="STOPPED", reason="full")), FindingState.FAIL, "STOPPED"),
        (
            changed(peers=pb.PeersStatus(registry="no etcd answers")),
            FindingState.WARN,
            "no etcd answers",
        ),
        (
            changed(peers=pb.PeersStatus(apart=["n7: another key"])),
            FindingState.WARN,
            "n7: another key",
        ),
        (changed(peers=pb.PeersStatus(pages_dropped=1234)), FindingState.WARN, "1,234 pages"),
    ],
)
def test_each_problem_gives_one_finding(
    status: pb.NodeStatusReply, state: FindingState, text: str
) -> None:
    (found,) = findings(status)
    assert (found.state, text in found.found) == (state, True), found
