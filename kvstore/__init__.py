"""kvstore: a distributed KV-cache store for LLM inference.

This package is what clients install. Names are imported on first use: a node's disk I/O process
needs only the errors and the checksum. Importing gRPC and the client would double its start time.
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
    from kvstore.results.hints import Hint, HintAction, HintResult

__version__ = "0.1.0"

__all__ = [
    "ByteRange",
    "Client",
    "ClientConfig",
    "ConfigError",
    "DeadlineExceeded",
    "Exhausted",
    "Forbidden",
    "Hint",
    "HintAction",
    "HintResult",
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
    "Hint": "results.hints",
    "HintAction": "results.hints",
    "HintResult": "results.hints",
    "Keep": "results",
    "LookupResult": "results",
    "PutOutcome": "results",
}  # every other name comes from errors

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
