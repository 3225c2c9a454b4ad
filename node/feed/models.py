"""Group the open namespaces into models: those whose pages make up a block together. No lock."""

from collections.abc import Iterator, Sequence
from operator import is_
from typing import NamedTuple

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
        self._wanted[part.group] = max(part.ranks, self._wanted.get(part.group, 0))
        self._group_count = max(part.groups, self._group_count)

    def finish(self) -> None:
        """Find out whether all parts are there."""
        there = all(
            len(self._groups.get(group, ())) == self._wanted.get(group, -1)
            for group in range(self._group_count)
        )
        groups = (self._groups[group] for group in range(self._group_count)) if there else ()
        self.parts = [some for ranks in groups for some in ranks.values()]

    def needs_more(self, before: "Model") -> bool:
        """Return whether blocks that readers know as stored may lack a part now.

        `before`: the same model, before namespaces were opened or learned their part.
        """
        return bool(before.parts) and (
            (self._part, self._group_count) != (before._part, before._group_count)
            or any(
                self._wanted[group] != before._wanted.get(group)
                or not ranks.keys() <= before._groups[group].keys()
                for group, ranks in self._groups.items()
            )
        )

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


class _Open(NamedTuple):
    """An open namespace, its description when it was looked at, and the id of its model."""

    space: NamespaceIndex
    value: Namespace
    model_id: bytes


class Models:
    """The models of a node. One thread at a time.

    A namespace that is closed keeps its model for a while: its last changes are read later.
    """

    def __init__(self, single: bool = False) -> None:
        """Begin without namespaces. `single`: each will be a model by itself."""
        self._single = single
        self._spaces: Sequence[NamespaceIndex] = ()
        self._values: Sequence[Namespace] = ()
        self._open: dict[bytes, _Open] = {}  # by digest
        self._closed: dict[bytes, bytes] = {}  # ids of models
        self._by_id: dict[bytes, Model] = {}

    def refresh(self, spaces: list[NamespaceIndex]) -> bool:
        """Take the namespaces that are open now.

        Return whether one of them belongs to another model than before, or a model needs more of
        them: then all is new.
        """
        values = [index.value for index in spaces]
        if spaces == self._spaces and all(map(is_, values, self._values)):
            return False
        self._spaces, self._values = spaces, values
        before, now = self._open, dict[bytes, _Open]()
        for index, value in zip(spaces, values, strict=True):
            known = before.get(index.digest)
            same = known is not None and known.space is index and known.value is value
            now[index.digest] = known if known and same else self._opened(index, value)
        self._open = now
        pairs = ((before, now), (now, before))
        return self._build(
            before,
            [some for here, there in pairs for d, some in here.items() if there.get(d) is not some],
        )

    def _opened(self, index: NamespaceIndex, value: Namespace) -> _Open:
        return _Open(index, value, index.digest if self._single else block_part(value).id)

    def _build(self, before: dict[bytes, _Open], changed: list[_Open]) -> bool:
        """Build the models of which namespaces have changed; return as `refresh` does."""
        ids = {some.model_id for some in changed}
        old, new = {name: self._by_id.get(name) for name in ids}, dict[bytes, Model]()
        for index, _, model_id in self._open.values():
            if model_id in ids:
                if model_id not in new:
                    new[model_id] = Model(model_id, index, self._single)
                new[model_id].add(index)
        for model in new.values():
            model.finish()
        is_new = any(
            known and new[name].needs_more(known) for name, known in old.items() if name in new
        )
        for index, _, model_id in changed:
            there = self._open.get(index.digest)
            is_new |= there is not None and there.model_id != model_id
        self._by_id |= new
        self._close(before)
        return is_new

    def _close(self, before: dict[bytes, _Open]) -> None:
        """Remember the models of namespaces that are not open any more."""
        for digest in self._open:
            self._closed.pop(digest, None)
        self._closed |= {
            digest: known.model_id for digest, known in before.items() if digest not in self._open
        }
        while len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]
        there = {known.model_id for known in self._open.values()}
        for model_id in self._by_id.keys() - there:
            self._by_id[model_id].parts = []
        for model_id in self._by_id.keys() - there - {*self._closed.values()}:
            del self._by_id[model_id]

    def of(self, digest: bytes) -> Model | None:
        """Return the model of a namespace; None if it is unknown."""
        known = self._open.get(digest)
        return self._by_id.get(known.model_id if known else self._closed.get(digest, b""))

    def find(self, model_id: bytes) -> Model | None:
        """Return a model; None if it is unknown."""
        return self._by_id.get(model_id)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._by_id.values()))
