"""Page layouts: refused values, the places of bytes, and the fingerprint."""

from typing import Any

import pytest

from kvstore import ByteRange, InvalidRequest, LayerGroup, PageLayout, Plane, opaque_layout
from kvstore.layout import DTYPE_NBYTES

K = Plane("k", "bfloat16", (8, 128))
V = Plane("v", "bfloat16", (8, 128))
SCALE = Plane("scale", "float32", (1,), unit_tokens=16)
MIXED = PageLayout(16, (LayerGroup("full", (0, 2), (K, V)), LayerGroup("index", (1, 2), (SCALE,))))


def test_slices_cover_the_page_without_gaps() -> None:
    offset = 0
    for piece in MIXED.slices:
        assert piece.offset == offset
        offset += piece.nbytes
    assert offset == MIXED.page_nbytes == 2 * 2 * 16 * 2048 + 2 * 4


def test_layer_has_one_range_per_group() -> None:
    plane_nbytes = 16 * 2048
    assert MIXED.layer_ranges(0) == (ByteRange(0, 2 * plane_nbytes),)
    assert MIXED.layer_ranges(1) == (ByteRange(4 * plane_nbytes, 4),)
    assert MIXED.layer_ranges(2) == (
        ByteRange(2 * plane_nbytes, 2 * plane_nbytes),
        ByteRange(4 * plane_nbytes + 4, 4),
    )
    assert MIXED.layers == (0, 1, 2)
    with pytest.raises(InvalidRequest, match="layer 3 is not in the layout"):
        MIXED.layer_ranges(3)


def test_adjacent_ranges_are_merged() -> None:
    layout = PageLayout(1, (LayerGroup("a", (0,), (K,)), LayerGroup("b", (0,), (V,))))
    assert layout.layer_ranges(0) == (ByteRange(0, layout.page_nbytes),)


@pytest.mark.parametrize(
    "other",
    [
        PageLayout(32, MIXED.groups),
        PageLayout(16, MIXED.groups[::-1]),
        PageLayout(16, MIXED.groups[:1]),
        PageLayout(16, (LayerGroup("full", (2, 0), (K, V)), MIXED.groups[1])),
        PageLayout(16, (LayerGroup("full", (0, 2), (V, K)), MIXED.groups[1])),
        PageLayout(16, (LayerGroup("fuller", (0, 2), (K, V)), MIXED.groups[1])),
        PageLayout(
            16, (LayerGroup("full", (0, 2), (Plane("k", "float16", (8, 128)), V)), MIXED.groups[1])
        ),
        PageLayout(
            16, (LayerGroup("full", (0, 2), (Plane("k", "bfloat16", (128, 8)), V)), MIXED.groups[1])
        ),
        PageLayout(
            16,
            (MIXED.groups[0], LayerGroup("index", (1, 2), (Plane("scale", "float32", (1,), 8),))),
        ),
    ],
)
def test_any_difference_changes_the_fingerprint(other: PageLayout) -> None:
    assert other != MIXED
    assert other.fingerprint != MIXED.fingerprint


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_unit_bytes_follow_from_dtype_and_shape(dtype: str) -> None:
    assert Plane("p", dtype, (3, 5)).unit_nbytes == 15 * DTYPE_NBYTES[dtype]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("", "uint8", (1,)), "plane name"),
        (("a b", "uint8", (1,)), "plane name"),
        (("a\n", "uint8", (1,)), "plane name"),
        (("é", "uint8", (1,)), "plane name"),
        (("p" * 65, "uint8", (1,)), "plane name"),
        (("p", "float4", (1,)), "dtype 'float4' is not one of uint8"),
        (("p", "uint8", ()), "1 to 8 positive sizes"),
        (("p", "uint8", (0,)), "1 to 8 positive sizes"),
        (("p", "uint8", (1,) * 9), "1 to 8 positive sizes"),
        (("p", "uint8", (1 << 40,)), "1 to 8 positive sizes"),
        (("p", "uint8", (1,), 0), "unit_tokens 0"),
        (("p", "uint8", (1,), 65537), "unit_tokens 65537"),
    ],
)
def test_invalid_plane_is_refused(arguments: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Plane(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("g", (), (K,)), "at least one layer"),
        (("g", (0,), ()), "one plane"),
        (("g", (65536,), (K,)), "0..65535"),
        (("g", (-1,), (K,)), "0..65535"),
        (("g", (1, 1), (K,)), "names a layer twice"),
        (("g", (1,), (K, K)), "names a plane twice"),
        (("g/h", (1,), (K,)), "group name"),
    ],
)
def test_invalid_group_is_refused(arguments: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        LayerGroup(*arguments)


@pytest.mark.parametrize(
    ("page_tokens", "groups", "named"),
    [
        (0, MIXED.groups, "page_tokens 0"),
        (65537, MIXED.groups, "page_tokens 65537"),
        (16, (), "at least one group"),
        (16, (MIXED.groups[0], MIXED.groups[0]), "same name"),
        (8, MIXED.groups, "no multiple of unit_tokens 16"),
        (1, (LayerGroup("g", tuple(range(40000)), (K, V)),), "80000 planes"),
    ],
)
def test_invalid_layout_is_refused(page_tokens: int, groups: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        PageLayout(page_tokens, groups)


@pytest.mark.parametrize("page_tokens", [1, 64])
def test_opaque_layout_has_the_requested_size(page_tokens: int) -> None:
    layout = opaque_layout(12345, page_tokens)
    assert (layout.page_nbytes, layout.page_tokens) == (12345, page_tokens)
