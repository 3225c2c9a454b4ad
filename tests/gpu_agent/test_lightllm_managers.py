"""Every memory manager of LightLLM as a pool.

The managers are objects with the attributes and shapes of LightLLM's classes. Pages are saved from
scattered token slots into a real node, and loaded into other slots of another, poisoned manager.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_agent import Agent, AgentConfig, TorchTransfer
from gpu_agent.layouts.lightllm import hybrid_pool, manager_pool, static_scales
from kvstore import Client, Namespace
from kvstore.errors import InvalidRequest

LAYERS, SLOTS, PAGE_TOKENS, PAGES = 3, 48, 8, 4
HEADS, DIM = 8, 128
BF16, INT8, UINT8 = torch.bfloat16, torch.int8, torch.uint8
Make = Callable[..., Any]


def filled(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


def manager(
    kv: tuple[int, int, torch.dtype],
    scale: tuple[int, torch.dtype] | None = None,
    static: tuple[int, ...] | None = None,
    padding: int = 1,
    device: str = "cpu",
) -> Any:
    """Make a manager of `kv` (rows, width, dtype) and `scale` (width, dtype) per token."""
    rows, width, dtype = kv
    made = SimpleNamespace(
        size=SLOTS,
        kv_buffer=filled(LAYERS, SLOTS + padding, rows, width, dtype=dtype, device=device),
    )
    if scale:
        made.scale_buffer = filled(
            LAYERS, SLOTS + padding, rows, scale[0], dtype=scale[1], device=device
        )
    if static:
        made.scales = torch.rand(static)
    return made


# LightLLM's name -> (constructor, bytes per token and layer with 8 KV heads of 128).
MANAGERS: dict[str, tuple[Callable[..., Any], int]] = {
    "MemoryManager": (lambda **more: manager((2 * HEADS, DIM, BF16), **more), 4096),
    "PPLINT8KVMemoryManager": (
        lambda **more: manager((2 * HEADS, DIM, INT8), (DIM // 8, BF16), **more),
        2048 + 512,
    ),
    "PPLINT4KVMemoryManager": (
        lambda **more: manager((2 * HEADS, DIM // 2, INT8), (DIM // 8, BF16), **more),
        1024 + 512,
    ),
    "FP8StaticPerHeadQuantMemManager": (
        lambda **more: manager((2 * HEADS, DIM, UINT8), static=(LAYERS, 2 * HEADS), **more),
        2048,
    ),
    "FP8StaticPerTensorQuantMemManager": (
        lambda **more: manager((2 * HEADS, DIM, UINT8), static=(LAYERS, 2), **more),
        2048,
    ),
    "Deepseek2MemoryManager": (lambda **more: manager((1, 576, BF16), **more), 1152),
    "Deepseek3_2MemoryManager": (lambda **more: manager((1, 648, BF16), **more), 1296),
    "FP8PerTokenGroupQuantDeepseek3_2MemoryManager": (
        lambda **more: manager((1, 800, UINT8), **more),
        800,
    ),
    "Deepseek2FP8KVMemoryManager": (lambda **more: manager((1, 578, UINT8), **more), 578),
    "INT8KVMemoryManager": (
        lambda **more: manager((2 * HEADS, DIM, INT8), (1, BF16), **more),
        2048 + 32,
    ),
    "CalibrationFP8KVMemoryManager": (
        lambda **more: manager((2 * HEADS, DIM, UINT8), **more),
        2048,
    ),
}


def hybrid(
    checkpoints: int = PAGES + 3,
    checkpoints_first: bool = False,
    attending: int = 2,
    device: str = "cpu",
) -> Any:
    """Return a `Qwen3NextMemManager` of 8 layers, every fourth of which has full attention."""
    lead = (checkpoints, 6) if checkpoints_first else (6, checkpoints)
    return SimpleNamespace(
        size=SLOTS,
        kv_buffer=filled(attending, SLOTS + 1, 2 * 2, 16, dtype=BF16, device=device),
        linear_config=SimpleNamespace(full_attention_interval=4, linear_layer_num=6),
        linear_att_big_page_buffers=SimpleNamespace(
            conv_state_cache=SimpleNamespace(
                buffer=filled(*lead, 24, 3, dtype=BF16, device=device)
            ),
            ssm_state_cache=SimpleNamespace(
                buffer=filled(*lead, 2, 4, 8, dtype=torch.float32, device=device)
            ),
        ),
    )


@pytest.fixture
def agent(client: Client, request: pytest.FixtureRequest) -> Any:
    made: list[Agent] = []

    def of(pool: Any) -> Agent:
        namespace = Namespace(request.node.name, pool.layout)
        made.append(Agent(client, namespace, pool, AgentConfig(workers=1, staging_nbytes=4 << 20)))
        return made[-1]

    yield of
    for one in made:
        one.close()
        assert one.check() == []


def buffers(made: Any) -> list[torch.Tensor]:
    """Return the bytes of all token slots, as `[layers, slots, bytes]` per buffer."""
    found = [made.kv_buffer, *([made.scale_buffer] if hasattr(made, "scale_buffer") else [])]
    return [buffer.flatten(2).view(torch.uint8) for buffer in found]


def scattered(count: int, among: int) -> torch.Tensor:
    return torch.randperm(among)[:count]


HASHES = [bytes([number]) * 16 for number in range(PAGES)]


@pytest.mark.parametrize("padding", [1, PAGE_TOKENS])
@pytest.mark.parametrize("name", MANAGERS)
def test_saved_tokens_load_into_other_slots(agent: Make, name: str, padding: int) -> None:
    make, nbytes = MANAGERS[name]
    ours, theirs = make(padding=padding), make(padding=padding)
    before = [buffer.clone() for buffer in buffers(theirs)]
    pool = manager_pool(ours, PAGE_TOKENS)
    assert pool.layout.page_nbytes == PAGE_TOKENS * LAYERS * nbytes
    source, target = (scattered(PAGES * PAGE_TOKENS, SLOTS) for _ in range(2))
    saver = agent(pool)
    assert saver.save(HASHES, source).done.result(60).dropped == 0
    assert (
        agent(manager_pool(theirs, PAGE_TOKENS)).load(HASHES, target).done.result(60).pages == PAGES
    )
    untouched = [slot for slot in range(SLOTS + padding) if slot not in target.tolist()]
    for mine, yours, old in zip(buffers(ours), buffers(theirs), before, strict=True):
        assert torch.equal(yours[:, target], mine[:, source])
        assert torch.equal(yours[:, untouched], old[:, untouched])


@pytest.mark.parametrize("checkpoints_first", [False, True])
def test_hybrid_states_are_saved_with_their_pages(agent: Make, checkpoints_first: bool) -> None:
    ours, theirs = (hybrid(checkpoints_first=checkpoints_first) for _ in range(2))
    axis = 0 if checkpoints_first else 1
    source, target = (
        {"token": scattered(PAGES * PAGE_TOKENS, SLOTS), "state": scattered(PAGES, PAGES + 3)}
        for _ in range(2)
    )
    agent(manager_pool(ours, PAGE_TOKENS)).save(HASHES, source).done.result(60)
    states = [
        [
            getattr(made.linear_att_big_page_buffers, kind).buffer
            for kind in ("conv_state_cache", "ssm_state_cache")
        ]
        for made in (ours, theirs)
    ]
    before = [state.clone() for state in states[1]]
    assert (
        agent(manager_pool(theirs, PAGE_TOKENS)).load(HASHES, target).done.result(60).pages == PAGES
    )
    for mine, yours in zip(buffers(ours), buffers(theirs), strict=True):
        assert torch.equal(yours[:, target["token"]], mine[:, source["token"]])
    rest = torch.tensor([slot for slot in range(PAGES + 3) if slot not in target["state"].tolist()])
    for mine, yours, old in zip(*states, before, strict=True):
        for moved, expected, where, whence in (
            (yours, mine, target["state"], source["state"]),
            (yours, old, rest, rest),
        ):
            left, right = moved.index_select(axis, where), expected.index_select(axis, whence)
            assert torch.equal(
                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            )


def test_hybrid_page_has_attention_tokens_then_states() -> None:
    made = hybrid()
    pool = manager_pool(made, PAGE_TOKENS)
    slots, checkpoint = scattered(PAGE_TOKENS, SLOTS), 3
    page = torch.zeros(pool.layout.page_nbytes, dtype=UINT8)
    units = pool.unit_table({"token": slots, "state": torch.tensor([checkpoint])}, 1)
    TorchTransfer().gather(pool, units, [page], None)
    caches = made.linear_att_big_page_buffers
    pieces = [made.kv_buffer[layer, slot] for layer in range(2) for slot in slots]
    for layer in range(6):
        pieces += [
            cache.buffer[layer, checkpoint]
            for cache in (caches.conv_state_cache, caches.ssm_state_cache)
        ]
    assert torch.equal(
        page, torch.cat([piece.contiguous().view(-1).view(UINT8) for piece in pieces])
    )


def test_hybrid_layers_are_numbered_like_the_models() -> None:
    layout = manager_pool(
        hybrid(attending=3, device="meta"), PAGE_TOKENS
    ).layout  # one layer of a draft model
    assert [group.name for group in layout.groups] == ["attention", "state"]
    assert layout.groups[0].layers == (3, 7, 8)
    assert layout.groups[1].layers == (0, 1, 2, 4, 5, 6)
    kv, state = 3 * PAGE_TOKENS * 2 * 2 * 16 * 2, 6 * (24 * 3 * 2 + 2 * 4 * 8 * 4)
    assert layout.page_nbytes == kv + state


def test_hybrid_states_must_fit_the_model() -> None:
    made = hybrid(device="meta")
    conv, ssm = (
        getattr(made.linear_att_big_page_buffers, kind).buffer
        for kind in ("conv_state_cache", "ssm_state_cache")
    )
    with pytest.raises(InvalidRequest, match="full_attention_interval=5"):
        hybrid_pool(made.kv_buffer, conv, ssm, PAGE_TOKENS, 5)
    with pytest.raises(InvalidRequest, match="expected at least 2"):
        hybrid_pool(made.kv_buffer[:1], conv, ssm, PAGE_TOKENS, 4)
    with pytest.raises(InvalidRequest, match="ssm_state"):
        hybrid_pool(made.kv_buffer, conv, ssm[:, 1:], PAGE_TOKENS, 4)
    with pytest.raises(InvalidRequest, match="which axis"):
        manager_pool(hybrid(checkpoints=6, device="meta"), PAGE_TOKENS)


def test_managers_have_different_layouts() -> None:
    """Only managers that differ in scales outside the cache share a layout; the salt differs."""
    layouts = {
        name: manager_pool(make(device="meta"), 64).layout for name, (make, _) in MANAGERS.items()
    }
    same = {
        "FP8StaticPerHeadQuantMemManager",
        "FP8StaticPerTensorQuantMemManager",
        "CalibrationFP8KVMemoryManager",
    }
    assert len({layouts[name].fingerprint for name in same}) == 1
    assert len({layout.fingerprint for layout in layouts.values()}) == len(layouts) - len(same) + 1
    sizes = {name: layout.page_nbytes // 64 // LAYERS for name, layout in layouts.items()}
    assert sizes == {name: nbytes for name, (_, nbytes) in MANAGERS.items()}


def test_static_scales_are_identified_by_their_values() -> None:
    salts = [
        static_scales(MANAGERS[name][0]())
        for name in (
            "FP8StaticPerHeadQuantMemManager",
            "FP8StaticPerTensorQuantMemManager",
            "MemoryManager",
        )
    ]
    assert len(set(salts)) == 3
    assert salts[2] == ""
    scales = torch.full((LAYERS, 2), 0.5)
    assert static_scales(SimpleNamespace(scales=scales)) == static_scales(
        SimpleNamespace(scales=scales.clone())
    )
    assert static_scales(SimpleNamespace(scales=scales)) != static_scales(
        SimpleNamespace(scales=scales * 2)
    )


def test_padding_slots_are_refused() -> None:
    for padding in (1, PAGE_TOKENS):
        pool = manager_pool(MANAGERS["MemoryManager"][0](padding=padding), PAGE_TOKENS)
        with pytest.raises(InvalidRequest, match=f"slot {SLOTS}"):
            pool.unit_table(torch.arange(SLOTS + 1 - PAGE_TOKENS, SLOTS + 1), 1)


def test_manager_with_an_unknown_buffer_is_refused() -> None:
    made = MANAGERS["Deepseek2MemoryManager"][0]()
    made.indexer_k_buffer = filled(LAYERS, SLOTS + 1, 1, 132, dtype=UINT8)
    with pytest.raises(InvalidRequest, match="indexer_k_buffer"):
        manager_pool(made, PAGE_TOKENS)
    with pytest.raises(InvalidRequest, match="no kv_buffer"):
        manager_pool(SimpleNamespace(size=4), PAGE_TOKENS)
