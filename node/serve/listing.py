"""Which pages there are: of a namespace, and of keys that somebody has."""

from kvstore.keys import check_prefix_hashes
from kvstore.pb import kvstore_pb2 as pb
from node.ram.inventory import Inventory, PageInfo
from node.serve.cluster_calls import ClusterCalls
from node.serve.replies import in_range

LIST_LIMIT_MAX = 8192  # pages in one List reply: about 160 bytes each, well below a message
LIST_LIMIT = 1000


class Listing:
    """Thread-safe."""

    def __init__(self, inventory: Inventory, cluster: ClusterCalls, batch_keys_max: int) -> None:
        self._inventory = inventory
        self._cluster = cluster
        self._batch_keys_max = batch_keys_max

    def list_pages(self, request: pb.ListRequest, caller: object) -> pb.ListReply:
        limit = min(request.limit or LIST_LIMIT, LIST_LIMIT_MAX)
        infos, rest_after = self._inventory.list_pages(
            request.namespace, request.key_prefix, request.page_token, limit, self._cluster.owned(request)
        )
        return pb.ListReply(pages=[_message(info) for info in infos], next_page_token=rest_after)

    def stat(self, request: pb.StatRequest, caller: object) -> pb.StatReply:
        check_prefix_hashes(request.prefix_hashes, self._batch_keys_max, distinct=False)
        infos = self._inventory.stat(request.namespace, request.prefix_hashes)
        return pb.StatReply(pages=[_message(info) for info in infos])


def _message(info: PageInfo) -> pb.PageStat:
    return in_range(pb.PageStat, **info._asdict())
