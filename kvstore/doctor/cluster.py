"""What the members of a cluster tell of each other: one view, one list, who is near."""

import time
from collections.abc import Iterator, Mapping

from kvstore.cluster.view import REGISTRIES, View, parse_view
from kvstore.config import ClientConfig
from kvstore.doctor.finding import Finding, fail, ok, skipped, warn
from kvstore.doctor.way import Way
from kvstore.errors import ConfigError

SETTLE_S = 1.0  # a view that has just changed reaches everybody within that

Views = dict[str, View]


def findings(view: View, ways: Mapping[str, Way]) -> Iterator[Finding]:
    """`ways`: to the members of the view, by id; gone through."""
    there = {member: way for member, way in ways.items() if way.hello is not None}
    yield _answers(view, there)
    if there:
        yield _agreement(there)
        yield _registry(there)
    if view.replicas > len(view.members):
        remedy = "start more members, or lower --replicas"
        yield warn("replicas", f"{view.replicas} are wanted of {len(view.members)} members: there are fewer", remedy)


def near(view: View, config: ClientConfig, shared: Mapping[str, bool]) -> Finding:
    """`shared`: by member, whether its shared memory can be mapped from here."""
    if config.near == "none":
        return ok("near node", "none is wanted (KVSTORE_NEAR=none): each page's owners are asked")
    if config.near != "auto":
        if config.near in view.by_id:
            return ok("near node", f"{config.near}, as KVSTORE_NEAR says")
        known = ", ".join(sorted(view.by_id))
        return fail("near node", f"KVSTORE_NEAR={config.near} is no member", f"name one of {known}, or auto")
    if config.wire not in ("auto", "shm"):
        return ok("near node", f"none by wire {config.wire}: each page's owners are asked")
    found = [member for member, mapped in shared.items() if mapped]
    if found:
        which = f"one of {', '.join(found)}" if len(found) > 1 else found[0]
        return ok("near node", f"{which}, by shared memory: it is asked for everything")
    return skipped("near node", "no member's shared memory can be mapped here: each page's owners are asked")


def _answers(view: View, there: Mapping[str, Way]) -> Finding:
    away = [member.id for member in view.members if member.id not in there]
    said = f"{len(there)} of {len(view.members)} answer here"
    if away:
        remedy = "see each of them above; their pages come from other owners, or are misses"
        return fail("members", f"{said}; not {', '.join(away)}", remedy)
    return ok("members", said)


def _agreement(there: Mapping[str, Way]) -> Finding:
    """Who is behind is asked once more, a moment later."""
    views = _told(there)
    if len({seen.number for seen in views.values()}) > 1:
        time.sleep(SETTLE_S)
        for way in there.values():
            way.ask_again()
        views = _told(there)
    alone = sorted(there.keys() - views.keys())
    if alone:
        remedy = "start it with the same --cluster as the others"
        return fail("view", f"{', '.join(alone)} is in no cluster, or tells of one that can not be", remedy)
    numbers = {seen.number for seen in views.values()}
    if len(numbers) > 1:
        said = ", ".join(f"{member} has {seen.number}" for member, seen in sorted(views.items()))
        return fail("view", said, "who is behind does not hear of changes: look at its registry, and at etcd")
    lists = {seen.members: member for member, seen in sorted(views.items())}
    if len(lists) > 1:
        said = f"{' and '.join(lists.values())} have lists of members that differ"
        return fail(
            "view", said, "give all members the same text as --cluster static:..., and restart those that differ"
        )
    if len({(seen.cluster, seen.replicas) for seen in views.values()}) > 1:
        return fail("view", "members differ in the cluster's name or in --replicas", "give all of them the same")
    return ok("view", f"number {numbers.pop()}, the same at all that answer")


def _told(there: Mapping[str, Way]) -> Views:
    views = Views()
    for member, way in there.items():
        if way.hello is not None and way.hello.HasField("view"):
            try:
                views[member] = parse_view(way.hello.view)
            except ConfigError:
                continue
    return views


def _registry(there: Mapping[str, Way]) -> Finding:
    wrong: dict[str, None] = {}
    told = False
    for member, way in sorted(there.items()):
        if way.status is None or not way.status.HasField("peers"):
            continue
        told, peers = True, way.status.peers
        if peers.registry not in REGISTRIES:
            wrong[f"{member} can not ask its registry: {peers.registry}"] = None
        wrong |= dict.fromkeys(f"not of the view: {line}" for line in peers.apart)
    if wrong:
        return warn("registry", "; ".join(wrong), "mend etcd, or the way to it; who is apart says why: docs/cluster.md")
    if not told:
        return skipped("registry", "told to an identity of all tenants only")
    return ok("registry", "all members can ask it, and nobody is apart")
