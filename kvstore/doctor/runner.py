"""Choose the checks and their order.

Later groups use the results of earlier ones:

    this host [data directory] [GPU] --> this client --> connections --> members --> transports
    --> cluster --> pages: put, get, remove
"""

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.cluster.nodes import is_here
from kvstore.cluster.view import State, View, parse_view
from kvstore.config import ClientConfig, parse_address
from kvstore.doctor import host, members
from kvstore.doctor.checks import Check, Finding, Group, one, probed, skipped
from kvstore.doctor.connectivity import GRACE_S, Connectivity, Wires
from kvstore.doctor.pages import Pages
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb

HOST_S, DIRECTORY_S, GPU_S = 10.0, 30.0, 120.0
PAGE_CALLS = 12  # calls for a test page: three transports and a disk
NOBODY = "no node answers"
MEMBERS_MAX = 16  # members that get a test page, however large the cluster is
WHERE_ENGINES_ARE = (
    "run this with the Python of the engine, which has torch, CuPy and the agent: "
    "python -m kvstore.cli.app"
)


@dataclass(frozen=True)
class Wanted:
    """The checks that the user asked for. `data_dir`: of a node on this host.

    `gpu`: an agent moves pages of a GPU here.
    """

    data_dir: Path | None = None
    gpu: bool = False


class Runner:
    """Check what a client with these settings can see.

    Consume `groups` once: each group runs when its findings are requested. Test pages are removed
    at the end, also when the caller stops early.
    """

    def __init__(self, config: ClientConfig, wanted: Wanted = Wanted()) -> None:
        self._config = config
        self._wanted = wanted
        self._nodes: dict[str, Connectivity] = {}  # by address
        self._wires: dict[str, Wires] = {}  # by member id, or address
        self._reached: dict[str, list[Finding]] = {}  # by address: findings on the connection
        self._pages: Pages | None = None

    def groups(self) -> Generator[Group, None, None]:
        """Yield the groups of checks, each after the previous one has run."""
        try:
            yield from self._host_checks()
            given = list(dict.fromkeys(self._config.addresses))
            yield Group(
                "connection to the nodes" if len(given) > 1 else "connection to the node",
                self._node_checks(given),
            )
            yield from self._node_groups()
        finally:
            if self._pages is not None:
                list(self._pages.clean())  # empty if they were cleaned already
            for wires in self._wires.values():
                wires.close()

    # ---- this host -----------------------------------------------------------------------

    def _host_checks(self) -> Iterator[Group]:
        wanted = self._wanted
        this_host = host.Host(wanted.data_dir is not None or self._names_this_host, wanted.gpu)
        yield Group("this host", [Check("this host", this_host.findings, HOST_S)])
        if wanted.data_dir is not None:
            remedy = "the disk hangs, or can not be used: the kernel's log (dmesg) says more"
            arguments = (
                "data directory",
                "kvstore.doctor.data_dir",
                [str(wanted.data_dir)],
                DIRECTORY_S,
                remedy,
            )
            limit_s = DIRECTORY_S + GRACE_S
            yield Group(
                "data directory", [Check("data directory", partial(probed, *arguments), limit_s)]
            )
        if wanted.gpu:
            find = partial(probed, "GPU", "gpu_agent.worker.probe", [], GPU_S, WHERE_ENGINES_ARE)
            yield Group("GPU", [Check("GPU", find, GPU_S + GRACE_S)])
        yield Group(
            "this client", [Check("this client", partial(host.findings, self._config), HOST_S)]
        )

    @property
    def _names_this_host(self) -> bool:
        return any(is_here(parse_address(address).host) for address in self._config.addresses)

    # ---- the nodes -----------------------------------------------------------------------

    def _node_checks(self, addresses: list[str]) -> list[Check]:
        checks = []
        for address in addresses:
            node = self._nodes[address] = Connectivity(address, self._config)
            of = address if len(addresses) > 1 else ""
            checks.append(
                Check("connection", partial(self._run_connectivity, node), node.limit_s, of)
            )
        return checks

    def _run_connectivity(self, node: Connectivity) -> Iterator[Finding]:
        found = self._reached[node.address] = []
        for finding in node.findings():
            found.append(finding)
            yield finding

    def _node_groups(self) -> Iterator[Group]:
        answered = [node for node in self._nodes.values() if node.hello is not None]
        if not answered:
            beyond = [
                one(name, partial(skipped, name, NOBODY), HOST_S)
                for name in ("node", "wires", "pages")
            ]
            yield Group("beyond it", beyond)
            return
        view = None if self._config.direct else newest(answered)
        nodes = {node.address: node for node in answered} if view is None else self._members(view)
        several = len(nodes) > 1 or view is not None
        title = "what the node reports" if view is None else f"members of {view.cluster}"
        yield Group(
            title, [self._member_check(node, key if several else "") for key, node in nodes.items()]
        )
        there = {key: node for key, node in nodes.items() if node.hello is not None}
        takes = [key for key, node in there.items() if _takes_pages(node, view, key)][:MEMBERS_MAX]
        self._wires = {key: Wires(node, keep=key in takes) for key, node in there.items()}
        yield Group(
            "wires",
            [_wires_check(wires, key if several else "") for key, wires in self._wires.items()],
        )
        if view is not None:
            yield self._cluster(view, nodes)
        yield from self._round_trip_checks(
            view, [node.hello for node in there.values() if node.hello is not None]
        )

    def _members(self, view: View) -> dict[str, Connectivity]:
        """Return the connections of the members, reusing those that were examined already."""
        return {
            some.id: self._nodes.get(some.address) or Connectivity(some.address, self._config)
            for some in view.members
        }

    def _member_check(self, node: Connectivity, of: str) -> Check:
        def find() -> Iterator[Finding]:
            if node.address not in self._reached:
                yield from members.reached(list(self._run_connectivity(node)))
            elif node.hello is None:
                yield skipped("reached", f"{node.address} does not answer, see above")
            if node.hello is not None:
                yield from members.about(node)

        return Check("member", find, node.limit_s, of)

    def _cluster(self, view: View, nodes: dict[str, Connectivity]) -> Group:
        shared = {key: "shm" in wires.clients for key, wires in self._wires.items()}
        limit_s = len(nodes) * self._config.timeout_s + HOST_S
        return Group(
            f"cluster {view.cluster}",
            [
                Check("cluster", partial(members.findings, view, nodes), limit_s),
                one("near node", partial(members.near, view, self._config, shared), HOST_S),
            ],
        )

    def _round_trip_checks(self, view: View | None, hellos: list[pb.HelloReply]) -> Iterator[Group]:
        if not hellos:
            yield Group(
                "pages", [one("round trip", partial(skipped, "round trip", NOBODY), HOST_S)]
            )
            return
        pages = Pages(self._config, hellos[0], view)
        if pages.why_not is not None:
            yield Group("pages", [one("round trip", partial(_same, pages.why_not), HOST_S)])
            return
        self._pages, limit_s = pages, PAGE_CALLS * self._config.timeout_s + GRACE_S
        checks = [Check("as a client", pages.of_client, limit_s)]
        for key, wires in self._wires.items():
            if not wires.keep:
                continue
            owner = key if view is not None else ""
            of = key if len(self._wires) > 1 or view is not None else ""
            checks.append(Check("round trip", partial(pages.of_node, wires, owner), limit_s, of))
        yield Group("pages: put and get", checks)
        yield Group("pages: clean-up", [Check("removed", pages.clean, limit_s)])


def newest(nodes: list[Connectivity]) -> View | None:
    """Return the newest view that these nodes know; None if they are in no cluster."""
    views = []
    for node in nodes:
        if node.hello is not None and node.hello.HasField("view"):
            with suppress(ConfigError):
                views.append(parse_view(node.hello.view))
    return max(views, key=lambda view: view.number, default=None)


def _wires_check(wires: Wires, of: str) -> Check:
    return Check("wires", wires.findings, 2 * wires.node.limit_s, of)


def _takes_pages(node: Connectivity, view: View | None, key: str) -> bool:
    """Return whether a node takes new pages."""
    if node.status is not None and node.status.state == "DRAINING":
        return False
    return view is None or view.by_id[key].state is not State.DRAINING


def _same(finding: Finding) -> Finding:
    return finding
