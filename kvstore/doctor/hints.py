"""Why does nothing hit? Pure: compares namespaces and their counters, answers in plain words."""

from collections.abc import Sequence
from dataclasses import fields

from kvstore.keys import Namespace
from kvstore.layout import PageLayout
from kvstore.pb import kvstore_pb2 as pb

DIFFERENCES_SHOWN = 4

_CAUSES = {
    "miss_absent": "the pages asked for were never stored here: does a writer save, and does it hash the same tokens?",
    "miss_evicted": "the pages were evicted before they were asked for again: give the node more RAM",
    "miss_writing": "the pages were still being written when they were asked for",
    "miss_removed": "the pages had been removed by a caller",
    "miss_expired": "the pages' time to live was over: put them with a longer one (Keep, --ttl)",
    "miss_corrupt": "the pages did not match their checksum and were dropped: check this machine's memory",
}


def page_count(info: pb.NamespaceInfo) -> int:
    """Pages of a namespace, in RAM or on disk: most of those in RAM are on disk, too."""
    return max(info.page_count, info.disk_page_count)


def hints(known: Sequence[tuple[Namespace, pb.NamespaceInfo]]) -> list[str]:
    """One line for each namespace that was asked for pages and never had the first one."""
    found = []
    for namespace, info in known:
        counters = info.counters
        if counters.pages_asked == 0 or counters.prefix_hits > 0:
            continue
        name = f"{namespace.model} [{namespace.digest.hex()[:12]}]: 0 of {counters.pages_asked} pages asked hit"
        found.append(f"{name}; {_nearest(namespace, known) or _cause(counters)}")
    return found


def _nearest(namespace: Namespace, known: Sequence[tuple[Namespace, pb.NamespaceInfo]]) -> str:
    """The namespace of the same model that has pages and differs least, and in what; or nothing."""
    siblings = [
        (len(differences(namespace, other)), other, info)
        for other, info in known
        if other.model == namespace.model and other.digest != namespace.digest and page_count(info)
    ]
    if not siblings:
        return ""
    _, other, info = min(siblings, key=lambda sibling: sibling[0])
    listed = differences(namespace, other)
    more = f" and {len(listed) - DIFFERENCES_SHOWN} more" if len(listed) > DIFFERENCES_SHOWN else ""
    return (
        f"[{other.digest.hex()[:12]}] of the same model holds {page_count(info)} pages but differs in "
        f"{', '.join(listed[:DIFFERENCES_SHOWN])}{more}"
    )


def _cause(counters: pb.Counters) -> str:
    if counters.pages_hit:
        return "later pages are there but the first one of each request is not, so no prefix is"
    return max(_CAUSES.items(), key=lambda cause: getattr(counters, cause[0]))[1]


def differences(ours: Namespace, theirs: Namespace) -> list[str]:
    """['tp_size (2, there 4)', 'layout.kv.k.dtype (bfloat16, there float16)', ...]"""
    found = _different_fields(
        {f.name: getattr(ours, f.name) for f in fields(ours) if f.name != "layout"},
        {f.name: getattr(theirs, f.name) for f in fields(theirs) if f.name != "layout"},
    )
    return found + _different_fields(_layout_fields(ours.layout), _layout_fields(theirs.layout))


def _different_fields(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    names = dict.fromkeys((*ours, *theirs))
    return [
        f"{name} ({_shown(ours, name)}, there {_shown(theirs, name)})"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _shown(values: dict[str, object], name: str) -> str:
    value = values.get(name, "none")
    return "empty" if value == "" else str(value)


def _layout_fields(layout: PageLayout) -> dict[str, object]:
    values: dict[str, object] = {"page_tokens": layout.page_tokens}
    for group in layout.groups:
        values[f"layout.{group.name}.layers"] = _layers(group.layers)
        for plane in group.planes:
            start = f"layout.{group.name}.{plane.name}"
            values[f"{start}.dtype"] = plane.dtype
            values[f"{start}.unit_shape"] = "x".join(str(n) for n in plane.unit_shape)
            values[f"{start}.unit_tokens"] = plane.unit_tokens
    return values


def _layers(layers: tuple[int, ...]) -> str:
    contiguous = layers == tuple(range(layers[0], layers[0] + len(layers)))
    return f"{layers[0]}..{layers[-1]}" if contiguous else ",".join(str(layer) for layer in layers)
