"""A pool names the invalid tensor or index before anything is copied."""

import pytest
import torch

from gpu_agent import KVPool
from kvstore import InvalidRequest, LayerGroup, PageLayout, Plane

LAYOUT = PageLayout(
    8,
    (LayerGroup("full", (0, 3), (Plane("k", "bfloat16", (2, 4)), Plane("v", "bfloat16", (2, 4)))),),
)


def good_tensors() -> dict[tuple[str, int, str], torch.Tensor]:
    return {
        ("full", layer, plane): torch.zeros(32, 2, 4, dtype=torch.bfloat16)
        for layer in (0, 3)
        for plane in ("k", "v")
    }


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(32, 2, 5, dtype=torch.bfloat16),
            r"group full layer 3 plane v: shape is \[32, 2, 5\], expected \[slots, 2, 4\]",
        ),
        (
            torch.zeros(32, 8, dtype=torch.bfloat16),
            r"group full layer 3 plane v: shape is \[32, 8\]",
        ),
        (
            torch.zeros(0, 2, 4, dtype=torch.bfloat16),
            r"group full layer 3 plane v: shape is \[0, 2, 4\]",
        ),
        (
            torch.zeros(32, 2, 4),
            r"group full layer 3 plane v: dtype is torch.float32, the layout says bfloat16",
        ),
        (torch.zeros(32, 2, 4, dtype=torch.float16), r"plane v: dtype is torch.float16"),
        (
            torch.zeros(32, 2, 4, dtype=torch.bfloat16, device="meta"),
            r"layer 3 plane v: is on meta, others are on cpu",
        ),
        (
            torch.zeros(32, 1, 4, dtype=torch.bfloat16).expand(32, 2, 4),
            r"layer 3 plane v: strides .* at one address",
        ),
    ],
)
def test_invalid_tensor_is_named_by_group_layer_and_plane(
    tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KVPool(LAYOUT, good_tensors() | {("full", 3, "v"): tensor})


def test_missing_and_unknown_tensors_are_named() -> None:
    lacking = good_tensors()
    del lacking["full", 3, "k"]
    with pytest.raises(InvalidRequest, match=r"lacks \('full', 3, 'k'\)"):
        KVPool(LAYOUT, lacking)
    with pytest.raises(InvalidRequest, match=r"has \('full', 1, 'k'\), which is not in the pool"):
        KVPool(
            LAYOUT, good_tensors() | {("full", 1, "k"): torch.zeros(32, 2, 4, dtype=torch.bfloat16)}
        )
    with pytest.raises(InvalidRequest, match=r"spaces names planes .*'scale'"):
        KVPool(LAYOUT, good_tensors(), {("full", "scale"): "token"})


def test_tensor_of_another_dtype_is_refused() -> None:
    """An engine that stores fp8 as uint8 needs a uint8 layout, since the layout is the identity."""
    layout = PageLayout(1, (LayerGroup("g", (0,), (Plane("k", "float8_e4m3fn", (4,)),)),))
    raw = torch.zeros(8, 4, dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="the layout says float8_e4m3fn"):
        KVPool(layout, {("g", 0, "k"): raw})
    KVPool(layout, {("g", 0, "k"): raw.view(torch.float8_e4m3fn)})


def test_planes_of_different_units_need_different_spaces() -> None:
    planes = (Plane("a", "uint8", (4,), unit_tokens=4), Plane("b", "uint8", (4,), unit_tokens=8))
    layout = PageLayout(8, (LayerGroup("g", (0,), planes),))
    tensors = {
        ("g", 0, "a"): torch.zeros(6, 4, dtype=torch.uint8),
        ("g", 0, "b"): torch.zeros(3, 4, dtype=torch.uint8),
    }
    with pytest.raises(
        InvalidRequest,
        match="plane b: has 8 tokens per unit, others in its index space 'block' have 4",
    ):
        KVPool(layout, tensors)
    pool = KVPool(layout, tensors, {("g", "b"): "large block"})
    assert {name: tuple(space) for name, space in pool.spaces.items()} == {
        "block": (4, 6),
        "large block": (8, 3),
    }


def test_index_space_is_limited_by_its_smallest_tensor() -> None:
    pool = KVPool(
        LAYOUT, good_tensors() | {("full", 0, "v"): torch.zeros(9, 2, 4, dtype=torch.bfloat16)}
    )
    pool.unit_table(torch.arange(1, 9), 1)
    with pytest.raises(InvalidRequest, match=r"name slot 9; allowed are 0\.\.8"):
        pool.unit_table(torch.arange(2, 10), 1)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (torch.arange(16, dtype=torch.int32), "must be a torch.int64 tensor, not torch.int32"),
        (list(range(16)), "must be a torch.int64 tensor, not list"),
        (torch.arange(15), r"have shape \[15\]; 2 pages of 8 units need \[16\]"),
        (torch.arange(17), r"have shape \[17\]"),
        (torch.arange(16).view(2, 8), r"have shape \[2, 8\]"),
        (torch.arange(16) - 1, r"name slot -1; allowed are 0\.\.31"),
        (torch.arange(16) + 17, r"name slot 32; allowed are 0\.\.31"),
        (torch.zeros(16, dtype=torch.int64, device="meta"), "are on meta; allowed are cpu and cpu"),
    ],
)
def test_invalid_units_are_refused(units: torch.Tensor, message: str) -> None:
    pool = KVPool(LAYOUT, good_tensors())
    given = units if isinstance(units, torch.Tensor) else {"token": units}
    with pytest.raises(InvalidRequest, match=message):
        pool.unit_table(given, 2)


def test_pool_of_two_spaces_needs_units_for_both(mixed_pool: KVPool) -> None:
    with pytest.raises(InvalidRequest, match="index spaces token, block: give units as a mapping"):
        mixed_pool.unit_table(torch.arange(8), 1)
    with pytest.raises(InvalidRequest, match="units: lacks 'block'"):
        mixed_pool.unit_table({"token": torch.arange(8)}, 1)
    with pytest.raises(InvalidRequest, match="has 'window'"):
        mixed_pool.unit_table(
            {"token": torch.arange(8), "block": torch.arange(2), "window": torch.arange(8)}, 1
        )
    table = mixed_pool.unit_table({"token": torch.arange(8), "block": torch.tensor([7, 2])}, 1)
    assert table.flat("block").tolist() == [7, 2]


def test_units_are_copied(token_pool: KVPool) -> None:
    mine = torch.arange(16)
    table = token_pool.unit_table(mine, 2)
    mine.fill_(0)
    assert table.flat("token").tolist() == list(range(16))
    assert table.select([1]).flat("token").tolist() == list(range(8, 16))
    assert table.select([1, 0]).flat("token").tolist() == [*range(8, 16), *range(8)]
    assert table.select(slice(0, 1)).flat("token").tolist() == list(range(8))


@pytest.mark.parametrize(
    ("skip_tokens", "message"),
    [
        (-4, "not in 0..16"),
        (20, "not in 0..16"),
        (6, "no multiple of 4, the tokens of a unit in space 'block'"),
    ],
)
def test_skip_must_be_whole_units_within_the_pages(
    mixed_pool: KVPool, skip_tokens: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        mixed_pool.check_skip(skip_tokens, page_count=2)
    mixed_pool.check_skip(16, page_count=2)
