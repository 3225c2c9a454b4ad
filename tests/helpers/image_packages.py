"""Determine which packages the node's image installs, from the metadata of installed packages."""

import importlib.metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def packages_of_the_image() -> set[str]:
    """Return the names of all packages in the node's image, dependencies included."""
    wanted: list[tuple[str, tuple[str, ...]]] = [("kvstore-llm", ("node", "cli"))]
    found: set[tuple[str, ...]] = set()
    while wanted:
        name, extras = wanted.pop()
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            marker, key = needed.marker, canonicalize_name(needed.name)
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                if (key, *needed.extras) not in found:
                    wanted.append((key, tuple(needed.extras)))
                found.add((key, *needed.extras))
    return {name for name, *_ in found}
