"""Bytes per page of real models, from tensors of the real shapes without memory.

Expected sizes come from the engines' size functions and page buffers, or from their documents.
"""

import pathlib
from collections.abc import Callable

import pytest
import torch

from gpu_agent import KVPool
from gpu_agent.host.page_table_tier import row_pool
from gpu_agent.layouts import lightllm, sglang, vllm

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "layouts.md"
BF16, INT8, UINT8 = torch.bfloat16, torch.int8, torch.uint8
SLOTS = 1 << 20  # 61 layers of such a pool pass 2^31 elements


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lightllm_heads(
    layers: int, heads: int = 8, dtype: torch.dtype = BF16
) -> Callable[[int], KVPool]:
    return lambda page: lightllm.heads_pool(
        tensor(layers, SLOTS + 1, 2 * heads, 128, dtype=dtype), page
    )


def lightllm_scaled(layers: int, dim: int, scales: int = 16) -> Callable[[int], KVPool]:
    data, scale = (
        tensor(layers, SLOTS + 1, 16, dim, dtype=INT8),
        tensor(layers, SLOTS + 1, 16, scales),
    )
    return lambda page: lightllm.scaled_pool(data, scale, page)


def lightllm_latent(row: int, dtype: torch.dtype = BF16) -> Callable[[int], KVPool]:
    return lambda page: lightllm.latent_pool(tensor(61, SLOTS + 1, 1, row, dtype=dtype), page)


def lightllm_hybrid(page: int) -> KVPool:
    """Return a pool of 48 layers: every fourth has attention with 2 heads of 256.

    The others have 16 k and 32 v heads of 128.
    """
    kv, conv = tensor(12, SLOTS + 1, 2 * 2, 256), tensor(36, 1000, (16 + 16 + 32) * 128, 3)
    return lightllm.hybrid_pool(
        kv, conv, tensor(36, 1000, 32, 128, 128, dtype=torch.float32), page, 4
    )


def sglang_heads(layers: int, heads: int = 8, dtype: torch.dtype = BF16) -> Callable[[int], KVPool]:
    k, v = ([tensor(SLOTS + 64, heads, 128, dtype=dtype) for _ in range(layers)] for _ in "kv")
    return lambda page: sglang.mha_pool(k, v, page)


def sglang_window(page: int) -> KVPool:
    full, window = ([tensor(slots, 8, 128) for _ in range(16)] for slots in (SLOTS, 8192))
    return sglang.window_pool(
        sglang.Heads(full, full, range(0, 32, 2)),
        sglang.Heads(window, window, range(1, 32, 2)),
        page,
    )


def sglang_latent(row: int, dtype: torch.dtype = BF16) -> Callable[[int], KVPool]:
    return lambda page: sglang.mla_pool([tensor(SLOTS + 64, 1, row, dtype=dtype)] * 61, page)


def sglang_sparse(
    layers: int, row: int, dtype: torch.dtype, indexers: int
) -> Callable[[int], KVPool]:
    latents = [tensor(SLOTS + 64, 1, row, dtype=dtype)] * layers
    pages = [tensor(1000 if layer < indexers else 0, 8448, dtype=UINT8) for layer in range(layers)]
    return lambda page: sglang.dsa_pool(latents, pages, page)


def blocks(
    layers: range, heads: int, tokens: int, cell: int, dtype: torch.dtype = BF16
) -> vllm.Blocks:
    return vllm.Blocks(
        {layer: tensor(1000, heads, tokens, cell, dtype=dtype) for layer in layers}, tokens
    )


def vllm_blocks(**groups: vllm.Blocks) -> Callable[[int], KVPool]:
    return lambda page: vllm.block_pool(groups, page)


# Engine, variant and example in docs/layouts.md -> pool for a page size.
DOCUMENTED: dict[tuple[str, str, str], Callable[[int], KVPool]] = {
    ("LightLLM", "`MemoryManager`", "Llama-3-8B"): lightllm_heads(32),
    ("LightLLM", "PPL INT8", "Llama-3-8B"): lightllm_scaled(32, 128),
    ("LightLLM", "PPL INT4", "Llama-3-8B"): lightllm_scaled(32, 64),
    ("LightLLM", "fp8, static scales", "Llama-3-8B"): lightllm_heads(32, dtype=UINT8),
    ("LightLLM", "INT8, historic", "Llama-3-8B"): lightllm_scaled(32, 128, 1),
    ("LightLLM", "hybrid, `Qwen3Next`", "Qwen3-Next-80B"): lightllm_hybrid,
    ("LightLLM", "CPU page pool, int8", "Llama-3-8B"): lambda page: row_pool(
        torch.empty((2, 32 * page * 16 * (128 + 2 * 16)), dtype=UINT8), page
    ),
    ("LightLLM", "`Deepseek2`", "DeepSeek-V3"): lightllm_latent(576),
    ("LightLLM", "`Deepseek2` FP8, historic", "DeepSeek-V3"): lightllm_latent(578, UINT8),
    ("LightLLM", "DSA, 16-bit", "DeepSeek-V3.2"): lightllm_latent(648),
    ("LightLLM", "DSA, fp8", "DeepSeek-V3.2"): lightllm_latent(800, UINT8),
    ("SGLang", "MHA, GQA", "Llama-3-8B"): sglang_heads(32),
    ("SGLang", "MHA, GQA, fp8", "Llama-3-8B"): sglang_heads(32, dtype=UINT8),
    ("SGLang", "sliding-window hybrid", "Llama-3-8B, 16 + 16 layers"): sglang_window,
    ("SGLang", "MLA", "DeepSeek-V3"): sglang_latent(576),
    ("SGLang", "MLA, raw fp8", "DeepSeek-V3"): sglang_latent(576, UINT8),
    ("SGLang", "DSA, packed fp8", "DeepSeek-V3.2"): sglang_sparse(61, 656, UINT8, 61),
    ("SGLang", "DSA, packed fp8, shared indexers", "GLM-5.2"): sglang_sparse(78, 656, UINT8, 21),
    ("vLLM", "GQA", "Llama-3-8B"): vllm_blocks(full=blocks(range(32), 8, 16, 256)),
    ("vLLM", "GQA, int8 per token and head", "Llama-3-8B"): vllm_blocks(
        full=blocks(range(32), 8, 16, 264, INT8)
    ),
    ("vLLM", "GQA, int4 per token and head", "Llama-3-8B"): vllm_blocks(
        full=blocks(range(32), 8, 16, 136, UINT8)
    ),
    ("vLLM", "MLA", "DeepSeek-V3"): vllm_blocks(full=blocks(range(61), 1, 64, 576)),
    ("vLLM", "DSA, packed fp8", "DeepSeek-V3.2"): vllm_blocks(
        kv=blocks(range(61), 1, 64, 656, UINT8), indexer=blocks(range(61), 1, 64, 132, UINT8)
    ),
    ("vLLM", "sliding-window hybrid", "Llama-3-8B, 16 + 16 layers"): vllm_blocks(
        full=blocks(range(0, 32, 2), 8, 16, 256)._replace(space="full"),
        window=blocks(range(1, 32, 2), 8, 16, 256)._replace(space="window"),
    ),
}


def test_documented_sizes_equal_those_of_the_constructors() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")] for line in DOCUMENT.read_text().splitlines()
    ]
    written = {(row[1], row[2], row[6]): row[7] for row in rows if len(row) == 9}
    del written["engine", "variant", "example"], written["---", "---", "---"]
    assert written == {key: f"{pool(64).layout.page_nbytes:,}" for key, pool in DOCUMENTED.items()}


SIZES = [
    (lightllm_heads(32), {64: 8_388_608, 256: 33_554_432}),
    (lightllm_heads(64), {64: 16_777_216, 256: 67_108_864}),
    (lightllm_heads(32, heads=1), {64: 1_048_576}),
    (lightllm_scaled(32, 128), {64: 5_242_880, 256: 20_971_520}),
    (lightllm_scaled(64, 128), {64: 10_485_760, 256: 41_943_040}),
    (lightllm_scaled(32, 64), {64: 3_145_728, 256: 12_582_912}),
    (lightllm_latent(576), {64: 4_497_408, 256: 17_989_632}),
    (lightllm_latent(578, UINT8), {1: 35_258, 64: 2_256_512, 256: 9_026_048}),
    (lightllm_latent(648), {1: 79_056, 64: 5_059_584}),
    (lightllm_latent(800, UINT8), {1: 48_800, 64: 3_123_200}),
    (sglang_heads(32), {1: 131_072, 16: 2_097_152, 64: 8_388_608, 256: 33_554_432}),
    (sglang_heads(32, dtype=UINT8), {16: 1_048_576, 64: 4_194_304, 256: 16_777_216}),
    (sglang_heads(32, heads=4), {64: 4_194_304}),  # TP 2
    (sglang_heads(32, heads=1), {64: 1_048_576}),  # TP 8
    (sglang_heads(64), {16: 4_194_304, 64: 16_777_216, 256: 67_108_864}),
    (sglang_latent(576), {1: 70_272, 16: 1_124_352, 64: 4_497_408, 256: 17_989_632}),
    (sglang_latent(576, UINT8), {16: 562_176, 64: 2_248_704, 256: 8_994_816}),
    (sglang_sparse(61, 656, UINT8, 61), {64: 2_561_024 + 515_328}),
    (sglang_sparse(78, 576, BF16, 78), {64: 5_750_784 + 658_944}),
    (sglang_sparse(78, 656, UINT8, 78), {64: 3_274_752 + 658_944}),
    (sglang_sparse(78, 656, UINT8, 21), {64: 3_274_752 + 177_408}),
    (
        vllm_blocks(full=blocks(range(32), 8, 16, 256)),
        {16: 2_097_152, 64: 8_388_608, 256: 33_554_432},
    ),
    (vllm_blocks(full=blocks(range(32), 8, 16, 264, INT8)), {16: 1_081_344, 64: 4_325_376}),
    (vllm_blocks(full=blocks(range(32), 8, 16, 136, UINT8)), {16: 557_056, 64: 2_228_224}),
    (vllm_blocks(full=blocks(range(61), 1, 64, 576)), {64: 4_497_408, 256: 17_989_632}),
]


@pytest.mark.parametrize(("pool", "sizes"), SIZES)
def test_page_sizes_of_real_models_equal_the_engines(
    pool: Callable[[int], KVPool], sizes: dict[int, int]
) -> None:
    assert {page: pool(page).layout.page_nbytes for page in sizes} == sizes


def test_layer_ranges_of_a_page() -> None:
    """DeepSeek-V3.2 has a layer's latents in the first group and its indexer page in the second."""
    layout = sglang_sparse(61, 656, UINT8, 61)(64).layout
    assert layout.layer_ranges(0) == ((0, 41_984), (2_561_024, 8_448))
    assert layout.layer_ranges(60) == ((60 * 41_984, 41_984), (2_561_024 + 60 * 8_448, 8_448))
