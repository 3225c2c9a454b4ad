"""The content of the recorded data directories."""

from typing import Any

from kvstore import Namespace, opaque_layout

KEY = bytes(range(1, 33))
LONG_S = 70 * 365 * 86400.0
# SPACE has pages of one leaf, LARGE a page of several. The encrypted directory lacks LARGE, because
# encrypted bytes do not compress.
SPACE = Namespace("golden", opaque_layout(8192), revision="r1", tenant="t")
LARGE = Namespace("golden", opaque_layout(2560 << 10), revision="r1", tenant="t")
KEYS = ([bytes([number]) * 32 for number in (1, 2, 3)], [b"\x04" * 16])
PAGES = ([bytes([number]) * 8192 for number in (1, 2, 3)], [bytes(range(256)) * (10 << 10)])
SETTINGS: dict[str, Any] = {
    "ram_nbytes": 32 << 20,
    "disk_nbytes": 16 << 20,
    "disk_extent_nbytes": 8 << 20,
    "extent_nbytes": 8 << 20,
}
