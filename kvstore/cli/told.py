"""What of a node's status was told: who is of one tenant hears of his own pages only, and of nothing else how much."""

from typing import Any

from kvstore.cli.output import plain
from kvstore.pb import kvstore_pb2 as pb


def told_all(status: pb.NodeStatusReply) -> bool:
    return status.HasField("ram")


def pages_told(status: pb.NodeStatusReply) -> int:
    """Pages in RAM: all, or his own."""
    return status.ram.page_count if told_all(status) else sum(info.page_count for info in status.namespaces)


def status_json(status: pb.NodeStatusReply) -> dict[str, Any]:
    """What was not told is null."""
    values = plain(status)
    if told_all(status):
        return values
    told = {field.name for field, _ in status.ListFields()}
    return {name: value if name in told else None for name, value in values.items()}
