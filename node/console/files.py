"""The page and what it loads: the same for everybody, and about nobody."""

from importlib import resources

from node.console.exchange import reply

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
NAMES = (
    "page.html",
    "style.css",
    "icon.svg",
    "console.js",
    "node.js",
    "board.js",
    "graphs.js",
    "look.js",
    "planes.js",
    "words.js",
)


def answers(prefix: str) -> dict[str, bytes]:
    """By path; the page itself is at `prefix`."""
    folder = resources.files(__package__)
    found = {}
    for name in NAMES:
        content_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        path = prefix if name == "page.html" else prefix + name
        found[path] = reply(content_type, folder.joinpath(name).read_bytes())
    return found
