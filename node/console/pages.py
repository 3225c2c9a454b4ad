"""Look up pages for the console: their keys, layout and bytes.

The node sends bytes as it does to any reader, and the browser decodes them: a get, with its
authorization, quotas and checksums.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.keys import (
    NAMESPACE_DIGEST_NBYTES,
    PREFIX_HASH_NBYTES_MAX,
    PREFIX_HASH_NBYTES_MIN,
    Namespace,
)
from kvstore.layout import PageLayout
from kvstore.messages import layout_message, plain
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.cluster.membership import Membership
from node.serving.http_server import Response, json_response
from node.serving.service import Service

FOUND_MAX = 8
LISTED_MAX = 24  # without a key
DIGITS_MIN = 4  # of a partial key; use `kvstore ls` for longer lists
BYTES_MAX = 4 << 20  # of one answer


class Pages:
    """Page look-ups. Thread-safe.

    `find` returns the description of an authorized namespace.
    """

    def __init__(
        self, service: Service, membership: Membership, find: Callable[[bytes], Namespace]
    ) -> None:
        self._service = service
        self._membership = membership
        self._find = find

    def look_up(self, values: Mapping[str, Any], caller: Caller) -> Response:
        """Answer a search for pages."""
        digest = namespace_of(values)
        digits = _digits(values, "key") if values.get("key", "") != "" else ""
        most = FOUND_MAX if digits else LISTED_MAX
        stats = self._stats(digest, digits, caller)
        namespace = self._find(digest)
        view = self._membership.view
        owners = []
        if view is not None and (whole := _whole(digits)):
            owners = list(view.owners.owners(digest, [whole])[0])
        described = {
            "digest": digest.hex(),
            "tenant": namespace.tenant,
            "model": namespace.model,
            "revision": namespace.revision,
            "epoch": str(namespace.epoch),
            "keyed": bool(namespace.key_id),
            "stored_nbytes": namespace.stored_nbytes,
            "page_nbytes": namespace.layout.page_nbytes,
            "layout": _described(namespace.layout),
        }
        found = [plain(stat) for stat in stats[:most]]
        return json_response(
            {
                "namespace": described,
                "pages": found,
                "more": len(stats) > most,
                "owners": owners,
            }
        )

    def _stats(self, digest: bytes, digits: str, caller: Caller) -> list[pb.PageStat]:
        """Return pages here whose keys begin with these digits, one more than are shown."""
        if not digits:
            first = pb.ListRequest(namespace=digest, limit=LISTED_MAX + 1)
            return list(self._service.call("list", first, caller).pages)
        if whole := _whole(digits):
            request = pb.StatRequest(namespace=digest, prefix_hashes=[whole])
            found = [
                page for page in self._service.call("stat", request, caller).pages if page.present
            ]
            if found:
                return found
        if len(digits) < DIGITS_MIN:
            raise InvalidRequest(f"key: {DIGITS_MIN} hex digits at least")
        prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
        half = int(digits[-1], 16) if len(digits) % 2 else None
        # Pages come in key order: those before the half byte are skipped, those behind it are cut.
        after = prefix + bytes([half << 4]) if half is not None else b""
        listed = pb.ListRequest(
            namespace=digest, key_prefix=prefix, page_token=after, limit=16 * FOUND_MAX
        )
        pages = self._service.call("list", listed, caller).pages
        wanted = (
            page for page in pages if half is None or page.prefix_hash[len(prefix)] >> 4 == half
        )
        return list(islice(wanted, FOUND_MAX + 1))

    def read(self, values: Mapping[str, Any], caller: Caller) -> Response:
        """Answer a request for bytes of a page."""
        digest, key = namespace_of(values), key_of(values)
        offset, nbytes = _number(values, "offset"), _number(values, "nbytes")
        if not 1 <= nbytes <= BYTES_MAX:
            raise InvalidRequest(f"nbytes {nbytes} is not in 1..{BYTES_MAX}")
        part = pb.ByteRange(offset=offset, nbytes=nbytes)
        request = pb.GetRequest(namespace=digest, prefix_hashes=[key], ranges=[part])
        with self._service.sessions.open(caller) as session:
            _, told, views = self._service.begin_get(session, request)
            if not any(told.hits):
                return json_response({"error": "it is not here any more"})
            return Response("application/octet-stream", b"".join(views))


def namespace_of(values: Mapping[str, Any]) -> bytes:
    """Return the namespace digest of a request."""
    return _bytes(values, "namespace", NAMESPACE_DIGEST_NBYTES, NAMESPACE_DIGEST_NBYTES)


def key_of(values: Mapping[str, Any]) -> bytes:
    """Return the prefix hash of a request."""
    return _bytes(values, "key", PREFIX_HASH_NBYTES_MIN, PREFIX_HASH_NBYTES_MAX)


def _bytes(values: Mapping[str, Any], name: str, low: int, high: int) -> bytes:
    digits = _digits(values, name)
    if len(digits) % 2 or not low <= len(digits) // 2 <= high:
        count = f"{2 * low}" if low == high else f"{2 * low} to {2 * high}"
        raise InvalidRequest(f"{name}: {count} hex digits name a whole one")
    return bytes.fromhex(digits)


def _digits(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    digits = text.strip().lower() if isinstance(text, str) else ""
    if (
        not digits
        or len(digits) > 2 * PREFIX_HASH_NBYTES_MAX
        or set(digits) - set("0123456789abcdef")
    ):
        raise InvalidRequest(f"{name}: hex digits, {2 * PREFIX_HASH_NBYTES_MAX} at most")
    return digits


def _whole(digits: str) -> bytes:
    """Parse a whole key; empty for a partial one."""
    low, high = 2 * PREFIX_HASH_NBYTES_MIN, 2 * PREFIX_HASH_NBYTES_MAX
    return bytes.fromhex(digits) if len(digits) % 2 == 0 and low <= len(digits) <= high else b""


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{name}: a whole number")
    return value


def _described(layout: PageLayout) -> dict[str, Any]:
    return plain(layout_message(layout))
