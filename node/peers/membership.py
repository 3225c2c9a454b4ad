"""Which cluster a node is a member of, and what it tells clients about it."""

from kvstore.cluster.view import View, static_view
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb


class Membership:
    """`view` None: the node is alone. Raises ConfigError for what can not be."""

    def __init__(self, cluster: str, member: str) -> None:
        self.view: View | None = static_view(cluster) if cluster else None
        self.member = member
        if self.view is None and member:
            raise ConfigError(f"member={member} is named, but no cluster")
        if self.view and member not in self.view.by_id:
            known = ", ".join(sorted(self.view.by_id))
            raise ConfigError(f"member={member!r} is not of the cluster {self.view.cluster}; its members are {known}")

    def tell(self, hello: pb.HelloReply) -> None:
        """Adds the view to what a client is told first."""
        if self.view is not None:
            hello.view.CopyFrom(self.view.message)
            hello.member_id = self.member
