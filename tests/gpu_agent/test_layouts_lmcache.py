"""LMCache's keys and shapes as names and layouts.

A name covers everything that distinguishes two objects.
"""

from dataclasses import replace

import pytest
import torch

from gpu_agent.layouts.lmcache import Naming, ObjectKey, object_layout, parse_key, shapes_layout
from gpu_agent.objects.store import ANY
from gpu_agent.options import Identity
from kvstore import ConfigError, Namespace, opaque_layout

H0 = "6309ed506b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c"
GOLDEN = f"m@02010201@3@{H0}@tenantA"
IDENTITY = Identity(revision="r1", salt="s", epoch=2)
LAYOUT = opaque_layout(64)


def space_of(naming: Naming, text: str) -> tuple[bytes, bytes]:
    name = naming.of_text(text, LAYOUT)
    return name.scope.digest, name.prefix_hash


def test_key_fields_become_namespace_fields() -> None:
    name = Naming(IDENTITY, "bf16").of_text(GOLDEN, LAYOUT)
    assert name.prefix_hash == bytes.fromhex(H0)
    assert name.scope == Namespace(
        model="m",
        layout=ANY,
        revision="r1",
        tp_rank=1,
        tp_size=2,
        salt="lmcache by=tenantA group=3 kv_format=bf16 kv_rank=02010201 salt=s",
        epoch=2,
    )


def test_text_and_object_keys_give_the_same_name() -> None:
    naming = Naming(IDENTITY, "bf16")
    assert parse_key(GOLDEN) == ObjectKey("m", 0x02010201, 3, bytes.fromhex(H0), "tenantA")
    assert naming.of_text(GOLDEN, None) == naming.of(parse_key(GOLDEN), None)


def test_any_difference_makes_another_name() -> None:
    keys = [
        GOLDEN,
        f"m@02010201@3@{H0}",
        f"m@02010201@3@{H0}@tenantB",
        f"m@02010201@3@{H0}@tenantA group=4",
        f"m@02010201@4@{H0}@tenantA",
        f"m@02000200@3@{H0}@tenantA",
        f"m@02010100@3@{H0}@tenantA",
        f"n@02010201@3@{H0}@tenantA",
        f"m@02010201@3@{H0[:-1]}d@tenantA",
        f"m@00000001@3@{H0}@tenantA",
        f"m@00000002@3@{H0}@tenantA",
        "m@00000001@3@01020304",
        "m@00000002@3@01020304",
        "m@01000100@3@01020304",
        "m@01000100@3@01020305",
        "m@1@2@3@4@5",
        "no key",
        "@01000100@0@" + H0,
    ]
    namings = [
        Naming(IDENTITY, "bf16"),
        Naming(IDENTITY, "fp8"),
        Naming(replace(IDENTITY, revision="r2"), "bf16"),
        Naming(replace(IDENTITY, salt="bf16"), "bf16"),
        Naming(replace(IDENTITY, tenant="t"), "bf16"),
        Naming(replace(IDENTITY, epoch=3), "bf16"),
    ]
    found = [space_of(naming, key) for naming in namings for key in keys]
    assert len(set(found)) == len(keys) * len(namings)
    assert all(16 <= len(prefix_hash) <= 64 for _, prefix_hash in found)
    assert [space_of(naming, key) for naming in namings for key in keys] == found


def test_consecutive_ranks_share_a_namespace() -> None:
    """LMCache's bench numbers its ranks; a namespace for each would cost a round trip each."""
    naming = Naming(IDENTITY, "bf16")
    names = [
        naming.of(ObjectKey("bench-model", i, 0, i.to_bytes(16, "big")), LAYOUT) for i in range(200)
    ]
    assert len({name.scope.digest for name in names}) == 1
    assert len({name.prefix_hash for name in names}) == 200


def test_key_is_restored_from_a_listed_object() -> None:
    naming = Naming(IDENTITY, "bf16")
    for text in (GOLDEN, f"m@02010201@3@{H0}", f"m@08070807@a@{H0}@a b%=c"):
        name = naming.of_text(text, None)
        namespace = replace(name.scope, layout=LAYOUT)
        assert naming.key_of(namespace, name.prefix_hash) == parse_key(text)
        assert Naming(IDENTITY, "fp8").key_of(namespace, name.prefix_hash) is None
    hashed = naming.of_text("m@00000001@3@01020304", None)
    assert naming.key_of(replace(hashed.scope, layout=LAYOUT), hashed.prefix_hash) is None
    assert naming.key_of(Namespace("m", LAYOUT, salt="vllm backend=CPU"), bytes(32)) is None


def test_incomplete_options_fail_the_start() -> None:
    with pytest.raises(ConfigError, match="give the option revision"):
        Naming(Identity(), "bf16")
    with pytest.raises(ConfigError, match="give the option kv_format"):
        Naming(IDENTITY, "")
    with pytest.raises(ConfigError, match="too long"):
        Naming(Identity(revision="r", salt="x" * 1000), "bf16")


def test_layout_follows_from_shapes_and_dtypes() -> None:
    shapes, dtypes = [(2, 4, 256, 1024), (2, 4, 256, 256)], [torch.float16, torch.uint8]
    nbytes = 2 * 4 * 256 * (1024 * 2 + 256)
    layout = object_layout([torch.Size(shape) for shape in shapes], dtypes, nbytes)
    assert layout.page_nbytes == nbytes
    assert [plane.dtype for plane in layout.groups[0].planes] == ["float16", "uint8"]
    assert layout == shapes_layout(tuple(shapes), tuple(dtypes))
    same_width = object_layout(shapes, [torch.bfloat16, torch.uint8], nbytes)
    assert same_width.page_nbytes == nbytes
    assert same_width.fingerprint != layout.fingerprint


def test_unknown_shapes_give_an_opaque_layout() -> None:
    assert object_layout([(4, 4)], [torch.float16], 31) == opaque_layout(31)
    assert object_layout([], [], 31) == opaque_layout(31)
    assert shapes_layout((), ()) is None
    odd = object_layout([(2, 3), ()], [torch.complex64, torch.bool], 49)
    assert odd.page_nbytes == 49
    assert [plane.name for plane in odd.groups[0].planes] == ["part0.complex64", "part1.bool"]
    assert object_layout([(1,) * 9], [torch.uint8], 1).page_nbytes == 1
