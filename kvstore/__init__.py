"""kvstore: a distributed KV-cache store for LLM inference. This package is what clients need."""

from kvstore.client import Client
from kvstore.config import ClientConfig, client_config
from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    ProtocolError,
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
    "Unavailable",
    "UnknownNamespace",
    "client_config",
    "opaque_layout",
    "prefix_hashes",
]
