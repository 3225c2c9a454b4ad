"""What a tenant is told of a node: what he needs to use it, and of pages his own only."""

from collections.abc import Sequence

from kvstore.pb import kvstore_pb2 as pb

# Of the node itself: as it is told to everybody.
_SAID = ("version", "instance_id", "state", "uptime_ms", "limits", "bulk_port", "metrics_port", "now_unix_ms")


def scoped(status: pb.NodeStatusReply, namespaces: Sequence[pb.NamespaceInfo], tenant: str) -> pb.NodeStatusReply:
    """Without tiers, connections and other members, which tell of what others do. `namespaces`: his."""
    own = pb.NodeStatusReply(namespaces=namespaces, tenants=[use for use in status.tenants if use.tenant == tenant])
    for name in _SAID:
        if status.DESCRIPTOR.fields_by_name[name].message_type:
            getattr(own, name).CopyFrom(getattr(status, name))
        else:
            setattr(own, name, getattr(status, name))
    for field in pb.Counters.DESCRIPTOR.fields:
        setattr(own.totals, field.name, sum(getattr(info.counters, field.name) for info in namespaces))
    return own
