"""`get --decode`: every data type, compared with values computed by hand or by torch."""

import math
import struct

import pytest

from kvstore.cli.decode import decode, layer_slices, plane_statistics
from kvstore.layout import DTYPE_NBYTES, LayerGroup, PageLayout, Plane

LAYOUT = PageLayout(
    4,
    (
        LayerGroup(
            "full",
            (0, 2),
            (Plane("k", "float16", (2,)), Plane("scale", "float32", (1,), unit_tokens=4)),
        ),
        LayerGroup("latent", (1, 2), (Plane("c", "uint8", (3,), unit_tokens=2),)),
    ),
)


def halves(*values: float) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}e", *values))


def test_statistics_of_float16() -> None:
    s = plane_statistics("float16", halves(1.5, -2.0, 0.0, -0.0, 65504.0))
    assert (s.count, s.min, s.max, s.zero_count, s.nan_count, s.inf_count) == (
        5,
        -2.0,
        65504.0,
        2,
        0,
        0,
    )
    assert s.mean == pytest.approx(65503.5 / 5)


def test_standard_deviation_is_of_the_population() -> None:
    s = plane_statistics("float16", halves(2, 4, 4, 4, 5, 5, 7, 9))
    assert (s.mean, s.std) == (5.0, 2.0)


def test_statistics_of_bfloat16() -> None:
    # 1.0, -3.0, 0.0, 2^-126 and 3.3895e38, the largest (1 bit of sign, 8 exponent, 7 mantissa)
    s = plane_statistics(
        "bfloat16", memoryview(struct.pack("<5H", 0x3F80, 0xC040, 0x0000, 0x0080, 0x7F7F))
    )
    assert (s.min, s.max, s.zero_count) == (-3.0, (2 - 2**-7) * 2.0**127, 1)


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [
        ("float8_e4m3fn", 0x7E, 448.0),
        ("float8_e4m3fn", 0x38, 1.0),
        ("float8_e4m3fn", 0xC0, -2.0),
        ("float8_e4m3fn", 0x01, 2.0**-9),
        ("float8_e4m3fn", 0x08, 2.0**-6),
        ("float8_e5m2", 0x7B, 57344.0),
        ("float8_e5m2", 0x3C, 1.0),
        ("float8_e5m2", 0xC1, -2.5),
        ("float8_e5m2", 0x01, 2.0**-16),
        ("int8", 0x80, -128.0),
        ("int8", 0x7F, 127.0),
        ("uint8", 0xFF, 255.0),
    ],
)
def test_single_bytes_have_the_value_of_their_type(dtype: str, code: int, value: float) -> None:
    s = plane_statistics(dtype, memoryview(bytes([code, code])))
    assert (s.min, s.max, s.mean, s.std) == (value, value, value, 0.0)


def test_e4m3fn_has_no_infinity_and_e5m2_has() -> None:
    every_byte = memoryview(bytes(range(256)))
    e4m3 = plane_statistics("float8_e4m3fn", every_byte)
    e5m2 = plane_statistics("float8_e5m2", every_byte)
    assert (e4m3.nan_count, e4m3.inf_count, e4m3.zero_count) == (2, 0, 2)
    assert (e5m2.nan_count, e5m2.inf_count, e5m2.zero_count) == (6, 2, 2)
    assert (e4m3.max, e5m2.max) == (448.0, 57344.0)


@pytest.mark.parametrize(
    ("dtype", "form", "values"),
    [
        ("float32", "f", [0.5, -1.5, 0.0, 3.25]),
        ("float64", "d", [0.1, -1e300, 1e300, 0.0]),
        ("int16", "h", [-32768, 32767, 0, 5]),
        ("int32", "i", [-(2**31), 2**31 - 1, 0, 5]),
        ("int64", "q", [-(2**63), 2**63 - 1, 0, 5]),
    ],
)
def test_statistics_of_wide_types(dtype: str, form: str, values: list[float]) -> None:
    s = plane_statistics(dtype, memoryview(struct.pack(f"<4{form}", *values)))
    assert (s.min, s.max, s.zero_count) == (min(values), max(values), 1)
    assert s.mean == pytest.approx(math.fsum(values) / 4)


@pytest.mark.parametrize(("dtype", "form"), [("float16", "e"), ("float32", "f")])
def test_non_finite_values_are_counted_and_left_out(dtype: str, form: str) -> None:
    data = struct.pack(f"<5{form}", math.nan, math.inf, -math.inf, 1.0, 3.0)
    s = plane_statistics(dtype, memoryview(data))
    assert (s.nan_count, s.inf_count, s.min, s.max, s.mean, s.count) == (1, 2, 1.0, 3.0, 2.0, 5)


def test_plane_without_finite_values_has_no_statistics() -> None:
    s = plane_statistics("float16", halves(math.nan, math.inf))
    assert (s.min, s.max, s.mean, s.std, s.nan_count, s.inf_count) == (None, None, None, None, 1, 1)


@pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
def test_every_type_of_a_layout_can_be_decoded(dtype: str) -> None:
    s = plane_statistics(dtype, memoryview(bytes(8 * DTYPE_NBYTES[dtype])))
    assert (s.count, s.zero_count, s.min, s.max) == (8, 8, 0, 0)


def test_planes_are_in_page_order_with_their_shapes() -> None:
    page = memoryview(bytearray(LAYOUT.page_nbytes))
    planes = list(decode(layer_slices(LAYOUT, None), page))
    assert [(p.group, p.layer, p.plane, p.shape) for p in planes] == [
        ("full", 0, "k", (4, 2)),
        ("full", 0, "scale", (1, 1)),
        ("full", 2, "k", (4, 2)),
        ("full", 2, "scale", (1, 1)),
        ("latent", 1, "c", (2, 3)),
        ("latent", 2, "c", (2, 3)),
    ]
    assert sum(p.nbytes for p in planes) == LAYOUT.page_nbytes


def test_one_layer_is_decoded_from_its_own_ranges() -> None:
    page = bytes(range(LAYOUT.page_nbytes))
    ranges = b"".join(
        page[part.offset : part.offset + part.nbytes] for part in LAYOUT.layer_ranges(2)
    )
    ours = list(decode(layer_slices(LAYOUT, 2), memoryview(ranges)))
    every = list(decode(layer_slices(LAYOUT, None), memoryview(page)))
    assert ours == [plane for plane in every if plane.layer == 2]
