"""Group the open namespaces into models: those whose pages make up a block together. No lock."""

from collections.abc import Iterator, Sequence
from operator import is_

from kvstore.keys import Namespace, block_part
from kvstore.pb import kvstore_pb2 as pb
from node.memory.page import NamespaceIndex

CLOSED_MAX = 4096  # namespaces that were closed, and whose last changes may still be read


class Model:
    """The namespaces of one engine's KV, by group and rank (`kvstore.keys.block_part`)."""

    def __init__(self, model_id: bytes, first: NamespaceIndex, single: bool = False) -> None:
        """Begin with no namespace. `single`: there will be one only, whatever part it is."""
        self.id = model_id
        self.value = first.value
        self._part = block_part(first.value) if single else None
        self._groups: dict[int, dict[int, list[NamespaceIndex]]] = {}
        self._wanted: dict[int, int] = {}  # ranks of each group
        self._group_count = 1
        self.parts: list[list[NamespaceIndex]] = []  # empty while a part is missing

    def add(self, index: NamespaceIndex) -> None:
        """Add a namespace."""
        if self._part is not None:
            self._groups, self._wanted = {0: {0: [index]}}, {0: 1}
            return
        part = block_part(index.value)
        self._groups.setdefault(part.group, {}).setdefault(part.rank, []).append(index)
        self._wanted[part.group] = part.ranks
        self._group_count = part.groups

    def finish(self) -> None:
        """Find out whether all parts are there."""
        there = all(
            len(self._groups.get(group, ())) == self._wanted.get(group, -1)
            for group in range(self._group_count)
        )
        groups = (self._groups[group] for group in range(self._group_count)) if there else ()
        self.parts = [some for ranks in groups for some in ranks.values()]

    @property
    def message(self) -> pb.FeedModel:
        """Return its description."""
        value, part = self.value, self._part
        of_part = {} if part is None else {**part._asdict(), "blocks": part.id}
        of_part.pop("id", None)
        return pb.FeedModel(
            **of_part,
            id=self.id,
            tenant=value.tenant,
            model=value.model,
            revision=value.revision,
            epoch=value.epoch,
            page_tokens=value.layout.page_tokens,
            namespaces=sorted(index.digest for part in self.parts for index in part),
        )


class Models:
    """The models of a node. One thread at a time.

    A namespace that is closed keeps its model for a while: its last changes are read later.
    """

    def __init__(self, single: bool = False) -> None:
        """Begin without namespaces. `single`: each will be a model by itself."""
        self._single = single
        self._spaces: Sequence[NamespaceIndex] = ()
        self._values: Sequence[Namespace] = ()
        self._open: dict[bytes, bytes] = {}  # ids of models by digest
        self._closed: dict[bytes, bytes] = {}
        self._by_id: dict[bytes, Model] = {}

    def refresh(self, spaces: list[NamespaceIndex]) -> bool:
        """Take the namespaces that are open now.

        Return whether one of them belongs to another model than before: then all is new.
        """
        values = [index.value for index in spaces]
        if spaces == self._spaces and all(map(is_, values, self._values)):
            return False
        known, self._values = self._open, values
        self._closed |= self._open
        before, self._by_id, self._open, self._spaces = self._by_id, {}, {}, spaces
        for index in spaces:
            model_id = index.digest if self._single else block_part(index.value).id
            self._open[index.digest] = model_id
            if model_id not in self._by_id:
                self._by_id[model_id] = Model(model_id, index, self._single)
            self._by_id[model_id].add(index)
        for model in self._by_id.values():
            model.finish()
        for digest in self._open:
            self._closed.pop(digest, None)
        while len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]
        for model_id in {*self._closed.values()} - self._by_id.keys():
            if model_id in before:
                self._by_id[model_id] = before[model_id]
                before[model_id].parts = []
        return any(known.get(digest, name) != name for digest, name in self._open.items())

    def of(self, digest: bytes) -> Model | None:
        """Return the model of a namespace; None if it is unknown."""
        model_id = self._open.get(digest) or self._closed.get(digest, b"")
        return self._by_id.get(model_id)

    def find(self, model_id: bytes) -> Model | None:
        """Return a model; None if it is unknown."""
        return self._by_id.get(model_id)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._by_id.values()))
