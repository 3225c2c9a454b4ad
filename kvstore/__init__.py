"""kvstore: a distributed KV-cache store for LLM inference.

This package is what clients need.

What is named here is imported when it is first used: a node's I/O process needs the errors and the
checksum, and would otherwise start with gRPC and a whole client, in twice the time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.config import ClientConfig, client_config
    from kvstore.errors import (
        ConfigError,
        DeadlineExceeded,
        Exhausted,
        Forbidden,
        InvalidRequest,
        KVStoreError,
        LayoutMismatch,
        ProtocolError,
        Unauthenticated,
        Unavailable,
        UnknownNamespace,
    )
    from kvstore.keys import Namespace, prefix_hashes
    from kvstore.layout import ByteRange, LayerGroup, PageLayout, Plane, opaque_layout
    from kvstore.results import Keep, LookupResult, PutOutcome

__version__ = "0.1.0"

__all__ = [
    "ByteRange",
    "Client",
    "ClientConfig",
    "ConfigError",
    "DeadlineExceeded",
    "Exhausted",
    "Forbidden",
    "InvalidRequest",
    "KVStoreError",
    "Keep",
    "LayerGroup",
    "LayoutMismatch",
    "LookupResult",
    "Namespace",
    "PageLayout",
    "Plane",
    "ProtocolError",
    "PutOutcome",
    "Unauthenticated",
    "Unavailable",
    "UnknownNamespace",
    "client_config",
    "opaque_layout",
    "prefix_hashes",
]

_HOMES = {
    "Client": "client",
    "ClientConfig": "config",
    "client_config": "config",
    "Namespace": "keys",
    "prefix_hashes": "keys",
    "ByteRange": "layout",
    "LayerGroup": "layout",
    "PageLayout": "layout",
    "Plane": "layout",
    "opaque_layout": "layout",
    "Keep": "results",
    "LookupResult": "results",
    "PutOutcome": "results",
}  # all others: errors

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
