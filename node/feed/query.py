"""Tell where the blocks of a prompt are, in each namespace of a model.

Clients combine the namespaces, and in a cluster the members, as they do with the feed.
"""

from collections.abc import Callable, Sequence

from kvstore.errors import InvalidRequest
from kvstore.keys import TEXT_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from node.feed.models import Model, Models
from node.memory.page import NamespaceIndex
from node.memory.tier import RamTier

RAM, DISK, COPY = 1, 2, 4  # the schema's `QueryPart.places`


def query(tier: RamTier, request: pb.QueryRequest, sees: Callable[[Model], bool]) -> pb.QueryReply:
    """Return what each namespace has of these blocks; neither a use nor a lookup of its pages."""
    if not request.model or max(map(len, (request.model, request.tenant))) > TEXT_NBYTES_MAX:
        raise InvalidRequest(f"name a model and a tenant of at most {TEXT_NBYTES_MAX} characters")
    names, hashes, reply = (
        (request.model, request.tenant),
        request.prefix_hashes[:],
        pb.QueryReply(),
    )
    models = Models(single=True)
    models.refresh([space for space in tier.namespaces.all() if space.value.model == names[0]])
    for model in models:
        if (names[1] and model.value.tenant != names[1]) or not sees(model):
            continue
        for part in model.parts:
            places = _places(tier, part[0], hashes)
            if any(places):
                reply.parts.append(pb.QueryPart(about=model.message, places=places))
    return reply


def _places(tier: RamTier, index: NamespaceIndex, hashes: Sequence[bytes]) -> bytes:
    """Return where each page is."""
    with tier.lock:  # so that none moves from one tier to the other meanwhile
        pages = tier.live_all(index, hashes)
        below = tier.below.present(index.digest, hashes)
    return bytes(
        (0 if page is None else RAM + COPY * page.is_copy) + DISK * on_disk
        for page, on_disk in zip(pages, below, strict=True)
    )
