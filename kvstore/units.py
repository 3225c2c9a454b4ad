"""Parse and format sizes and durations as people write them. Pure."""

import re

_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]{1,3})?)\s*(?:([kmgt])(i?b)?|b)?(/s)?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s|min|m|h|d|)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

SIZE_FORMS = "4096, 512MiB, 64GiB or 64G (powers of 1024), 64GB (powers of 1000)"
DURATION_FORMS = "500ms, 90s, 30m, 1h or 7d"


def parse_nbytes(text: str, per_s: bool = False) -> int:
    """Parse a size to bytes: '4GiB', '4G', '4g' = 4 x 1024^3; '4GB' = 4 x 1000^3; '4096'.

    Units are k, m, g and t, in any case, after spaces or none. `per_s`: '8MiB/s' is accepted, too.
    Raises ValueError, which lists the forms.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[4] and not per_s):
        raise ValueError(f"{text!r} is not a size; write for example {SIZE_FORMS}")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    unit: int = base ** _POWERS[(match[2] or "").lower()]
    if match[1].isdigit():
        return int(match[1]) * unit
    try:
        return int(float(match[1]) * unit)
    except OverflowError as error:
        raise ValueError(f"{text!r} is too large") from error


def format_nbytes(nbytes: int) -> str:
    """Format a size exactly, so that `parse_nbytes` returns it: 65536 -> '64KiB'."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and not nbytes % (1 << shift):
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def parse_duration(text: str) -> float:
    """Parse '90', '90s', '30m', '1h', '7d' or '500ms' to seconds.

    Raises ValueError, which lists the forms.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write for example {DURATION_FORMS}")
    return float(match[1]) * _SECONDS[match[2].lower()]
