"""Verify pages: compare all copies of a page that this node has with its checksum."""

from collections.abc import Callable, Sequence

from kvstore.pb import kvstore_pb2 as pb
from node.disk.durability import Durability
from node.ram.inventory import Inventory
from node.ram.tier import RamTier
from node.serve.charge import Charge
from node.serve.content import Content

_HEALTH = {True: pb.PAGE_INTACT, False: pb.PAGE_DROPPED, None: pb.PAGE_ABSENT}


class Verifying:
    """Verifies pages in place: reading a copy on disk evicts nothing from RAM. Thread-safe."""

    def __init__(self, tier: RamTier, content: Content, durability: Durability) -> None:
        self._tier = tier
        self._inventory = Inventory(tier)
        self._content = content
        self._durability = durability

    def verify(
        self, digest: bytes, prefix_hashes: Sequence[bytes], charge: Charge, check: Callable[[], None]
    ) -> pb.VerifyReply:
        """Return the state of each page. A page that can not be read is an error, not absent.

        `check` is called before each page and may raise.
        """
        good = []
        for prefix_hash in prefix_hashes:
            check()
            good.append(self._verified(digest, prefix_hash, charge))
        pages = [_HEALTH[some] for some in good]
        return pb.VerifyReply(intact=good.count(True), dropped=good.count(False), absent=good.count(None), pages=pages)

    def _verified(self, digest: bytes, prefix_hash: bytes, charge: Charge) -> bool | None:
        """Return whether all copies of a page are intact, None if there is none. Drop bad ones."""
        page_nbytes, in_ram = self._tier.namespace(digest).page_nbytes, None
        with self._inventory.inspected(digest, prefix_hash) as page:
            if page is not None:
                charge.add_processed(page_nbytes)
                in_ram = self._content.intact(page)
        on_disk = self._durability.verify(digest, prefix_hash, lambda: charge.add_processed(page_nbytes))
        return on_disk if in_ram is None else in_ram and on_disk is not False
