"""Compare a recorded list of promises with the current one.

Additions are allowed, except new parameters that callers must pass.
"""

from typing import Any


def broken(promised: Any, found: Any, path: str = "") -> list[str]:
    """Return a line for each promise that is not kept."""
    if not isinstance(promised, dict):
        return [] if promised == found else [f"{path}: was {promised!r}, is {found!r}"]
    if not isinstance(found, dict):
        return [f"{path}: is {found!r}"]
    lines = []
    for name, value in promised.items():
        place = f"{path}/{name}"
        if name not in found:
            lines.append(f"{place}: is gone")
        elif name in _LOOSER:
            lines += (
                []
                if _LOOSER[name](value, found[name])
                else [f"{place}: was {value!r}, is {found[name]!r}"]
            )
        else:
            lines += broken(value, found[name], place)
    if path.endswith("/parameters"):
        new = [name for name in found if name not in promised and not found[name]["optional"]]
        lines += [f"{path}/{name}: must be given now" for name in new]
    return lines


# Values that may change in one direction: a required parameter may become optional, and a range may
# become wider.
_LOOSER = {
    "optional": lambda was, now: now or not was,
    "low": lambda was, now: now is None or (was is not None and now <= was),
    "high": lambda was, now: now is None or (was is not None and now >= was),
    # None: any value
    "choices": lambda was, now: was.keys() <= now.keys() if was else not now,
}
