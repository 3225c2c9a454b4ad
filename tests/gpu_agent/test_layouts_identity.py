"""Which pools share a layout, and which are refused with the tensor's name."""

from collections.abc import Callable

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.layouts import lightllm, sglang, vllm
from gpu_agent.layouts.group import GroupView, pool_of
from kvstore import InvalidRequest, Namespace


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def blocks(*shape: int, block_tokens: int = 4, dtype: torch.dtype = torch.bfloat16) -> vllm.Blocks:
    return vllm.Blocks({0: rows(*shape, dtype=dtype), 1: rows(*shape, dtype=dtype)}, block_tokens)


def test_heads_in_one_plane_and_in_two_differ() -> None:
    one = lightllm.heads_pool(rows(2, 17, 8, 16), 4).layout
    two = sglang.mha_pool([rows(16, 4, 16)] * 2, [rows(16, 4, 16)] * 2, 4).layout
    assert one.page_nbytes == two.page_nbytes
    assert one.fingerprint != two.fingerprint


def test_layout_covers_dtype_and_page_size_but_not_slots() -> None:
    latent = lightllm.latent_pool(rows(2, 17, 1, 576), 4).layout
    assert latent == lightllm.latent_pool(rows(2, 99, 1, 576), 4).layout
    assert latent != lightllm.latent_pool(rows(2, 17, 1, 576, dtype=torch.float16), 4).layout
    assert latent != lightllm.latent_pool(rows(2, 17, 1, 576), 8).layout


def test_layout_covers_the_range_of_layers() -> None:
    first = sglang.mla_pool([rows(16, 1, 576)] * 2, 4)
    second = sglang.mla_pool([rows(16, 1, 576)] * 2, 4, first_layer=2)
    assert (first.layout.layers, second.layout.layers) == ((0, 1), (2, 3))
    assert first.layout.fingerprint != second.layout.fingerprint
    pages = [
        torch.zeros(3, 64 * 132, dtype=torch.uint8),
        torch.zeros(0, 64 * 132, dtype=torch.uint8),
    ]
    indexer = sglang.dsa_pool(
        [rows(200, 1, 576)] * 2, pages[::-1], 64, first_layer=2
    ).layout.groups[1]
    assert (indexer.name, indexer.layers) == ("indexer", (3,))


def test_layout_ignores_the_order_of_groups_and_layers() -> None:
    a, b = blocks(8, 2, 4, 16), blocks(8, 1, 4, 32)
    turned = vllm.Blocks(dict(reversed(a.views.items())), 4)
    assert (
        vllm.block_pool({"a": a, "b": b}, 8).layout
        == vllm.block_pool({"b": b, "a": turned}, 8).layout
    )


def test_layout_follows_from_shapes_alone() -> None:
    real = [rows(9, 2, 8)] * 2
    shaped = [torch.empty(16, 2, 8, dtype=torch.bfloat16, device="meta")] * 2
    assert sglang.mha_pool(shaped, shaped, 4).layout == sglang.mha_pool(real, real, 4).layout


def test_shard_equals_a_slice_of_all_heads() -> None:
    """A rank's heads in a tensor of their own give the same page as a slice of all heads."""
    whole = [torch.randn(32, 4, 8) for _ in range(4)]
    units = torch.randperm(32)[:16]
    for rank in range(2):
        sliced = [tensor[:, 2 * rank : 2 * rank + 2] for tensor in whole]
        pages = []
        for heads in (sliced, [tensor.contiguous() for tensor in sliced]):
            pool = sglang.mha_pool(heads[:2], heads[2:], 8)
            pages.append(torch.zeros(2, pool.layout.page_nbytes, dtype=torch.uint8))
            TorchTransfer().gather(pool, pool.unit_table(units, 2), list(pages[-1]), None)
        assert torch.equal(*pages)
        assert pages[0].any()


def test_shards_of_split_heads_have_separate_namespaces() -> None:
    layout = sglang.mha_pool([rows(16, 4, 16)], [rows(16, 4, 16)], 4).layout
    shards = {Namespace("llama", layout, tp_rank=rank, tp_size=8).digest for rank in range(8)}
    assert len(shards) == 8


def test_lightllms_padding_slot_is_refused() -> None:
    pool = lightllm.scaled_pool(rows(2, 17, 4, 16), rows(2, 17, 4, 2), 4)
    pool.unit_table(torch.tensor([15, 0, 3, 9]), 1)
    with pytest.raises(InvalidRequest, match=r"name slot 16; allowed are 0\.\.15"):
        pool.unit_table(torch.tensor([16, 0, 3, 9]), 1)


def test_blocks_of_several_kernel_blocks_are_indexed_by_block() -> None:
    pool = vllm.block_pool({"full": blocks(36, 2, 4, 16, block_tokens=16)}, 32)
    assert {name: tuple(space) for name, space in pool.spaces.items()} == {"block": (16, 9)}


def test_separate_block_tables_have_separate_slots() -> None:
    window = blocks(6, 2, 4, 16)._replace(space="window")
    pool = vllm.block_pool({"full": blocks(8, 2, 4, 16), "window": window}, 8)
    assert {name: tuple(space) for name, space in pool.spaces.items()} == {
        "block": (4, 8),
        "window": (4, 6),
    }


REFUSED: list[tuple[Callable[[], KVPool], str]] = [
    (
        lambda: lightllm.heads_pool(rows(17, 8, 16), 4),
        r"kv_buffer: shape is \[17, 8, 16\], expected \[layers, slots",
    ),
    (
        lambda: lightllm.heads_pool(rows(2, 17, 7, 16), 4),
        "kv_buffer: 7 heads; K and V need as many each",
    ),
    (
        lambda: lightllm.heads_pool(rows(2, 1, 8, 16), 4),
        r"group attention layer 0 plane kv: shape is \[0, 8, 16\]",
    ),
    (
        lambda: lightllm.scaled_pool(rows(2, 17, 8, 16), rows(2, 18, 8, 2), 4),
        r"scale buffer: shape is \[2, 18, 8, 2\], expected \[2, 17, 8, dim\]",
    ),
    (
        lambda: lightllm.scaled_pool(rows(2, 17, 8, 16), rows(2, 17, 8), 4),
        r"scale buffer: shape is \[2, 17, 8\]",
    ),
    (
        lambda: lightllm.latent_pool(rows(2, 17, 2, 576), 4),
        r"kv_buffer: shape is .*slots \+ 1, 1, row\]",
    ),
    (
        lambda: lightllm.latent_pool(rows(2, 17, 1, 8, dtype=torch.complex64), 4),
        "group attention layer 0 plane latent: torch.complex64 has no name in a layout",
    ),
    (
        lambda: lightllm.latent_pool(rows(2, 1, 1, 8).expand(2, 17, 1, 8), 4),
        "group attention layer 0 plane latent: strides .* at one address",
    ),
    (
        lambda: sglang.mha_pool([rows(16, 4, 16)] * 3, [rows(16, 4, 16)] * 2, 4),
        "group attention plane v: 2 tensors for 3 layers",
    ),
    (
        lambda: sglang.mha_pool([rows(16, 4, 16)], [rows(16, 64)], 4),
        r"group attention: v_buffer\[0\]: shape is \[16, 64\], expected \[slots, heads, dim\]",
    ),
    (
        lambda: sglang.mha_pool(
            [rows(16, 4, 16), rows(16, 2, 16)], [rows(16, 4, 16)] * 2, 4, first_layer=5
        ),
        r"group attention layer 6 plane k: shape is \[16, 2, 16\], expected \[slots, 4, 16\]",
    ),
    (
        lambda: sglang.mha_pool(
            [rows(16, 4, 16)] * 2, [rows(16, 4, 16), rows(16, 4, 16, dtype=torch.float16)], 4
        ),
        "group attention layer 1 plane v: dtype is torch.float16, the layout says bfloat16",
    ),
    (lambda: sglang.mla_pool([], 4), "group kv plane latent: 0 tensors for 0 layers"),
    (
        lambda: sglang.mla_pool([rows(16, 576)], 4),
        r"kv_buffer\[0\]: shape is \[16, 576\], expected \[slots, 1, row\]",
    ),
    (
        lambda: sglang.dsa_pool([rows(200, 1, 656)], [rows(3, 64, 132)], 64),
        r"index_buffer\[0\]: shape is \[3, 64, 132\], expected \[pages, page bytes\]",
    ),
    (
        lambda: sglang.dsa_pool([rows(200, 1, 656)], [rows(0, 8448)], 64),
        "group indexer plane page: 0 tensors for 0 layers",
    ),
    (
        lambda: sglang.dsa_pool([rows(200, 1, 656)], [rows(3, 8448)], 32),
        r"page_tokens 32 is no multiple of unit_tokens 64 \(page\)",
    ),
    (
        lambda: sglang.window_pool(
            sglang.Heads([rows(16, 4, 16)], [rows(16, 4, 16)], (0,)),
            sglang.Heads([rows(9, 4, 16)], [rows(9, 4, 16)], (1, 2)),
            4,
        ),
        "group window plane k: 1 tensors for 2 layers",
    ),
    (
        lambda: vllm.block_pool({"full": blocks(8, 4, 32)}, 4),
        r"group full layer 0: shape is \[8, 4, 32\], expected \[blocks, heads, tokens, cell\]",
    ),
    (
        lambda: vllm.block_pool({"full": blocks(8, 2, 3, 32, block_tokens=16)}, 16),
        "group full layer 0: 8 kernel blocks of 3 tokens are no whole blocks of 16 tokens",
    ),
    (
        lambda: vllm.block_pool({"full": blocks(10, 2, 4, 32, block_tokens=16)}, 16),
        "group full layer 0: 10 kernel blocks of 4 tokens are no whole blocks of 16 tokens",
    ),
    (
        lambda: vllm.block_pool({"full": blocks(8, 2, 32, 8, block_tokens=16)}, 16),
        "8 kernel blocks of 32 tokens",
    ),
    (
        lambda: vllm.block_pool(
            {"full": vllm.Blocks({3: rows(8, 2, 4, 8), 7: rows(8, 1, 4, 8)}, 4)}, 4
        ),
        r"group full layer 7 plane cell: shape is \[8, 1, 1, 4, 8\], expected \[slots, 1, 2, 4, "
        r"8\]",
    ),
    (
        lambda: vllm.block_pool(
            {"a": blocks(8, 2, 4, 8), "b": blocks(8, 2, 8, 8, block_tokens=8)}, 8
        ),
        "group b layer 0 plane cell: has 8 tokens per unit, others in its index space 'block' have "
        "4",
    ),
    (
        lambda: vllm.block_pool({"full": blocks(8, 2, 4, 8)}, 6),
        "page_tokens 6 is no multiple of unit_tokens 4",
    ),
    (
        lambda: vllm.block_pool(
            {"full": vllm.Blocks({0: rows(8, 2, 4, 8), 1: rows(8, 2, 4, 8).to("meta")}, 4)}, 4
        ),
        "group full layer 1 plane cell: is on meta, others are on cpu",
    ),
    (
        lambda: pool_of(4, *[GroupView("kv", (0,), {"latent": [rows(16, 8)]})] * 2),
        "two groups have the same name",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_mismatched_layout_is_named(make: Callable[[], KVPool], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()
