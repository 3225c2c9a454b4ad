"""Describe LMCache's objects, which lie in no pool.

An object is a chunk of tokens of one KV rank and one object group: contiguous bytes, its layer
groups one after the other. This module parses its key and its shapes.

    key      <model>@<kv_rank, 8 hex>@<group, hex>@<chunk hash, hex>[@<cache salt>]
    kv_rank  world_size << 24 | rank << 16 | local_world_size << 8 | local_rank

Model, rank, group and salt go into the namespace, the chunk hash is the prefix hash. Keys of
another form (benchmarks number their ranks, tests have hashes of 4 bytes) are hashed completely, in
namespaces of their own.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import quote, unquote

import torch

from gpu_agent.objects.parts import ObjectName
from gpu_agent.objects.store import ANY
from gpu_agent.options import Identity, facts_text
from gpu_agent.pool import dtype_name
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.keys import PREFIX_HASH_NBYTES_MAX, PREFIX_HASH_NBYTES_MIN, Namespace
from kvstore.layout import LayerGroup, PageLayout, Plane, opaque_layout

ENGINE = "lmcache"
SHAPE_SIZES_MAX = 8  # dimensions of a plane's unit
SCOPES_MAX = 4096  # cached; each cache salt has its own
bytes_layout = functools.lru_cache(maxsize=64)(opaque_layout)


class ObjectKey(NamedTuple):
    """The parts of a key, as LMCache's own class has them."""

    model_name: str
    kv_rank: int
    object_group_id: int
    chunk_hash: bytes
    cache_salt: str = ""


def parse_key(text: str) -> ObjectKey:
    """Parse a key. Raises ValueError for another form."""
    model, kv_rank, group, chunk_hash, *salt = text.split("@")
    if len(salt) > 1:
        raise ValueError(f"{len(salt) + 4} fields in key {text!r}")
    return ObjectKey(
        model, int(kv_rank, 16), int(group, 16), bytes.fromhex(chunk_hash), "".join(salt)
    )


class Naming:
    """Names for objects.

    `kv_format` describes in words what neither the key nor LMCache says: how the engines compute
    and what they write.

    Raises ConfigError if it is empty, or if `identity` has no revision: a key names a model, never
    its weights.
    """

    def __init__(self, identity: Identity, kv_format: str) -> None:
        if not identity.revision:
            raise ConfigError(
                "LMCache's keys do not say which weights the KV is of; give the option revision, "
                "such as a commit or a date, and another one after every change of the weights"
            )
        if not kv_format:
            raise ConfigError(
                "LMCache does not say how the engines behind it compute; give the option "
                "kv_format, such as "
                '"vllm 0.33 bf16 kv=fp8_e4m3": the engine, dtype and quantisation of weights and '
                "KV, the attention "
                "backend, a draft model, and max_model_len if the model's rotary embedding is "
                "longrope"
            )
        self._identity = identity
        self._kv_format = kv_format
        self._scopes: dict[tuple[str, int | None, int, str], Namespace] = {}
        try:
            self._scope("x", 0x01000100, 0, "x" * 128)
        except InvalidRequest as error:
            raise ConfigError(f"the options for a namespace are too long: {error}") from error

    def of_text(self, text: str, layout: PageLayout | None) -> ObjectName:
        """Name an object by its key in text form; other forms are hashed as a whole."""
        try:
            key = parse_key(text)
        except ValueError:
            return ObjectName(
                self._scope(ENGINE, None, 0, ""), _digest("text", text.encode()), layout
            )
        return self.of(key, layout)

    def of(self, key: "ObjectKey", layout: PageLayout | None) -> ObjectName:
        """Name an object by a key with the attributes of `ObjectKey`."""
        try:
            return self._of(key, layout)
        except InvalidRequest:  # such as an empty model name
            odd = repr(
                (key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)
            )
            return ObjectName(
                self._scope(ENGINE, None, 0, ""), _digest("odd", odd.encode()), layout
            )

    def _of(self, key: "ObjectKey", layout: PageLayout | None) -> ObjectName:
        sized = PREFIX_HASH_NBYTES_MIN <= len(key.chunk_hash) <= PREFIX_HASH_NBYTES_MAX
        if sized and _shard(key.kv_rank) is not None:
            scope = self._scope(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
            return ObjectName(scope, key.chunk_hash, layout)
        scope = self._scope(key.model_name, None, key.object_group_id, key.cache_salt)
        return ObjectName(scope, _digest(f"{key.kv_rank:08x}", key.chunk_hash), layout)

    def key_of(self, namespace: Namespace, prefix_hash: bytes) -> ObjectKey | None:
        """Return the key of an object that was named here; None for others and hashed keys."""
        facts = dict(fact.partition("=")[::2] for fact in namespace.salt.split(" "))
        try:
            key = ObjectKey(
                namespace.model,
                int(facts["kv_rank"], 16),
                int(facts["group"], 16),
                prefix_hash,
                unquote(facts["by"]),
            )
        except (KeyError, ValueError):
            return None
        same = self.of(key, None).scope == replace(namespace, layout=ANY)
        return key if same else None

    def _scope(self, model: str, kv_rank: int | None, group: int, cache_salt: str) -> Namespace:
        parts = (model, kv_rank, group, cache_salt)
        scope = self._scopes.get(parts)
        if scope is None:
            rank, size = (_shard(kv_rank) if kv_rank is not None else None) or (0, 1)
            facts = facts_text(
                ENGINE,
                # Escaped, so that no salt can look like another fact.
                by=quote(cache_salt, safe=""),
                group=f"{group:x}",
                kv_format=quote(self._kv_format, safe=""),
                kv_rank="in-key" if kv_rank is None else f"{kv_rank:08x}",
            )
            identity = replace(self._identity, model=model)
            scope = identity.namespace(ANY, facts, tp_rank=rank, tp_size=size)
            if len(self._scopes) >= SCOPES_MAX:
                self._scopes.clear()
            self._scopes[parts] = scope
        return scope


def object_layout(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], nbytes: int
) -> PageLayout:
    """Return the layout of an object: a plane per layer group.

    If the shapes do not explain the bytes, as with compressed objects, it is opaque.
    """
    layout = shapes_layout(tuple(map(tuple, shapes)), tuple(dtypes))
    return layout if layout is not None and layout.page_nbytes == nbytes else bytes_layout(nbytes)


@functools.lru_cache(maxsize=1024)
def shapes_layout(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
) -> PageLayout | None:
    """Return the layout of shapes; None without any."""
    planes = tuple(
        _plane(f"part{number}", shape, dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    return PageLayout(1, (LayerGroup(ENGINE, (0,), planes),)) if planes else None


def _plane(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Plane:
    if len(shape) > SHAPE_SIZES_MAX:
        shape = (torch.Size(shape).numel(),)
    try:
        return Plane(name, dtype_name(dtype), shape or (1,))
    except InvalidRequest:  # a dtype that layouts do not know: bytes, named after it
        named = f"{name}.{str(dtype).removeprefix('torch.')}"
        return Plane(named, "uint8", (*shape[:-1], (shape[-1] if shape else 1) * dtype.itemsize))


def _shard(kv_rank: int) -> tuple[int, int] | None:
    """Return (rank, world size); None for a number that encodes neither."""
    size, rank, local_size, local_rank = (kv_rank >> shift & 0xFF for shift in (24, 16, 8, 0))
    plausible = rank < size and local_rank < local_size <= size and 0 <= kv_rank < 1 << 32
    return (rank, size) if plausible else None


def _digest(kind: str, data: bytes) -> bytes:
    return hashlib.sha256(f"kvstore-lmcache {kind}\0".encode() + data).digest()
