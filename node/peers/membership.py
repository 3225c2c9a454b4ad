"""Which cluster a node is a member of, and what it tells clients about it."""

import threading
from collections.abc import Callable
from dataclasses import replace

from kvstore.cluster.view import State, View, static_view
from kvstore.errors import ConfigError, InvalidRequest, Unavailable
from kvstore.pb import kvstore_pb2 as pb

ETCD_SCHEME = "etcd://"
Listener = Callable[[View], None]


class Membership:
    """Thread-safe. `view` None: the node is alone, or `joining`. Raises ConfigError for what can not be."""

    def __init__(self, cluster: str, member: str, replicas: int = 0) -> None:
        """`replicas` of a fixed list, 0: 1."""
        self.member = member
        self.joining = cluster.startswith(ETCD_SCHEME)  # no view yet, and nobody may think that there is no cluster
        self.view: View | None = None
        if cluster and not self.joining:
            self.view = _listed(cluster, replicas)
        self.registry: Callable[[], tuple[str, list[str]]] = lambda: ("static", [])  # how it is, and who is apart
        self.announcer: Callable[[State], None] | None = None  # None: a fixed list
        self._announced: State | None = None
        self._lock = threading.Lock()  # held while listeners are told, so that none hears of an older view last
        self._listeners: list[Listener] = []
        if not cluster and (member or replicas):
            named = f"member={member}" if member else f"replicas={replicas}"
            raise ConfigError(f"{named} is named, but no cluster; name it with --cluster, or leave that out")
        if self.view and member not in self.view.by_id:
            known = ", ".join(sorted(self.view.by_id))
            raise ConfigError(
                f"member={member!r} is not of the cluster {self.view.cluster}; its members are {known}; say which of "
                "them this node is (--member)"
            )

    def become(self, view: View, member: str = "") -> None:
        """The view has changed, and perhaps which of its members this node is."""
        with self._lock:
            self.member = member or self.member
            self.view = view
            self.joining = False
            for listener in self._listeners:
                listener(view)

    def serve_frames(self, bulk_port: int) -> None:
        """This node serves frames there: those who are told of a fixed list hear of it."""
        view = self.view
        if view is not None:
            own = replace(view.by_id[self.member], bulk_port=bulk_port)
            self.become(replace(view, members=tuple(own if some.id == own.id else some for some in view.members)))

    def on_view(self, listener: Listener) -> None:
        """Is told of the view, if there is one, and of every later one; it must not wait for anything."""
        with self._lock:
            self._listeners.append(listener)
            if self.view is not None:
                listener(self.view)

    def forget(self, listener: Listener) -> None:
        """It is told of nothing more, and not again of what it is told just now."""
        with self._lock:
            self._listeners.remove(listener)

    def announce(self, state: State) -> None:
        """Tells the cluster in which state this member is. Raises InvalidRequest where its members are a fixed list."""
        if self.announcer is None:
            raise InvalidRequest(
                f"the members of a fixed list stay as they are; {self.member} can not become {state.name}; stop it, "
                "and start the others with a list without it, or use etcd"
            )
        self._announced = state
        self.announcer(state)

    def joined(self) -> None:
        """It serves now, unless somebody has said by then what else it does."""
        if self._announced is None:
            self.announce(State.SERVING)

    def tell(self, hello: pb.HelloReply) -> None:
        """Adds the view to what a client is told first. Raises Unavailable while there is none yet."""
        if self.joining:
            raise Unavailable("this node is joining its cluster; ask another member, or again in a moment")
        view = self.view
        if view is not None:
            hello.view.CopyFrom(view.message)
            hello.member_id = self.member


def _listed(cluster: str, replicas: int) -> View:
    view = replace(static_view(cluster), replicas=replicas or 1)
    if view.replicas > len(view.members):
        raise ConfigError(
            f"replicas={replicas}, but the cluster {view.cluster} has {len(view.members)} members; list more of them, "
            "or ask for fewer replicas"
        )
    return view
