"""The linker with SGLang's own pools, layer counter and configuration, on CPU tensors."""

import secrets
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from asking import traces_of_calls
from harness import PAGE, dsa, hashes
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

import gpu_agent.engines.sglang_linker as adapter
import gpu_agent.engines.sglang_weights as weights
from kvstore import Client, ClientConfig
from kvstore.errors import ConfigError
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named

Make = Callable[..., Any]
LAYERS, SLOTS = 4, 1024
TOKENS = list(range(10 * PAGE))
SOURCE = torch.arange(len(TOKENS)) + PAGE
# Pages in reverse order.
TARGET = torch.arange(len(TOKENS)).view(10, PAGE).flip(0).reshape(-1) + 512


def mha() -> Any:
    return MHATokenToKVPool(
        SLOTS, PAGE, torch.bfloat16, 2, 16, LAYERS, "cpu", False, start_layer=0, end_layer=LAYERS
    )


def later_stage() -> Any:
    return MHATokenToKVPool(
        SLOTS, PAGE, torch.bfloat16, 2, 16, LAYERS, "cpu", False, start_layer=8, end_layer=12
    )


def mla() -> Any:
    return MLATokenToKVPool(
        SLOTS, PAGE, torch.bfloat16, 48, 16, LAYERS, "cpu", False, start_layer=0, end_layer=LAYERS
    )


POOLS = {"mha": mha, "later stage": later_stage, "mla": mla}


def tensors(pool: Any) -> list[torch.Tensor]:
    """Return the bytes of all slots, by layer."""
    if hasattr(pool, "k_buffer"):
        pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
        return [torch.cat([k, v], dim=-1).view(torch.uint8) for k, v in pairs]
    return [latents.view(torch.uint8) for latents in pool.kv_buffer]


def fill(pool: Any) -> None:
    for buffer in [
        *getattr(pool, "k_buffer", []),
        *getattr(pool, "v_buffer", []),
        *getattr(pool, "kv_buffer", []),
    ]:
        buffer.view(torch.uint8).copy_(
            torch.randint(0, 256, buffer.view(torch.uint8).shape, dtype=torch.uint8)
        )


def transfer(
    slots: torch.Tensor | None = None, pages: int = 10, tokens: list[int] = TOKENS
) -> list[PoolTransfer]:
    return [PoolTransfer(name=PoolName.KV, keys=hashes(tokens, PAGE)[:pages], device_indices=slots)]


@pytest.fixture
def arguments() -> SimpleNamespace:
    return harness.server_arguments(secrets.token_hex(20))


@pytest.fixture
def linker(
    shared_node: NodeProcess, arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Return `linker(pool, option=...)`, which makes a linker by SGLang's factory."""
    monkeypatch.setattr(weights, "model_config", lambda _: {"model_type": "llama"})
    made = []

    def make(
        pool: Any,
        components: Any = frozenset({ComponentType.FULL}),
        drafts: tuple[Any, ...] = (),
        **options: Any,
    ) -> Any:
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            page_size=PAGE,
            mtp_draft_device_pools=(),
            sidecar_draft_device_pools=drafts,
            attn_tp_cache_group=None,
            tp_cache_group=None,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
        )
        extra = {"address": shared_node.address, "lookup_timeout_s": 2.0, **options}
        config = {
            "linker": "KVStoreLinker",
            "linker_module_path": "gpu_agent.engines.sglang_linker",
            "linker_extra_config": extra,
        }
        made.append(
            create_unified_cache_linker(
                arguments,
                params,
                backend="dynamic",
                config=config,
                components=set(components),
                forward_stream=None,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def offloaded(linker: Make, slots: torch.Tensor = SOURCE, **more: Any) -> bool:
    assert linker.offload(transfer(slots, **more))
    while not linker.num_completed_offloads():
        threading.Event().wait(0.01)
    return bool(linker.pop_completed_offload())


def test_calls_carry_the_request_id(linker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups and loads carry the engine's request id; an offload has an id of its own.

    The engine passes no request id to an offload.
    """
    one, asked = linker(mha()), traces_of_calls(monkeypatch)
    assert offloaded(one)
    (own,) = set(asked)
    assert own is not None
    del asked[:]
    assert one.lookup("rid-7", transfer()) == list(range(1, 11))
    assert one.load("rid-7", transfer(TARGET))
    index = one.start_layer_wise_loading()
    assert one.finish_layer_wise_loading(index)
    assert set(asked) == {named("rid-7")}
    assert len(asked) > 1
    assert own != named("rid-7")


def test_offloads_of_a_session_share_its_id(linker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = linker(mha()), traces_of_calls(monkeypatch)
    for number, session in enumerate(("session-1", "session-2", "session-1")):
        del asked[:]
        assert one.offload(transfer(SOURCE, tokens=[number, *TOKENS[1:]]), session_id=session)
        while not one.num_completed_offloads():
            threading.Event().wait(0.01)
        assert one.pop_completed_offload()
        assert set(asked) == {named(session)}


@pytest.mark.parametrize("wire", ["shm", "bulk"])
@pytest.mark.parametrize("kind", POOLS)
def test_pages_load_layer_by_layer(linker: Make, kind: str, wire: str) -> None:
    source, target = POOLS[kind](), POOLS[kind]()
    fill(source)
    fill(target)
    before = [layer.clone() for layer in tensors(target)]
    writer, reader = linker(source, wire=wire), linker(target, wire=wire)
    assert reader.lookup("r", transfer()) == []
    assert offloaded(writer)
    assert reader.lookup("r", transfer()) == list(range(1, 11))
    assert reader.load("r", transfer(TARGET))
    index = reader.start_layer_wise_loading()
    counter = reader.layer_done_counter
    counter.set_consumer(index)
    for layer, (have, want) in enumerate(zip(tensors(target), tensors(source), strict=True)):
        counter.wait_until(layer)
        now = tensors(target)[layer]
        assert torch.equal(now[TARGET], want[SOURCE]), f"layer {layer}"
        del have
    assert reader.finish_layer_wise_loading(index)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[TARGET] = False
    for now, then in zip(tensors(target), before, strict=True):
        assert torch.equal(now[:SLOTS][untouched], then[:SLOTS][untouched])
    assert reader.start_layer_wise_loading() == -1


def test_requests_of_one_batch_load_together(linker: Make) -> None:
    pool = mha()
    fill(pool)
    one = linker(pool)
    other = [7, *TOKENS[1:]]
    assert offloaded(one)
    assert offloaded(one, SOURCE, tokens=other)
    assert one.load("a", transfer(TARGET))
    assert one.load("b", transfer(TARGET + 256, tokens=other))
    index = one.start_layer_wise_loading()
    assert one.finish_layer_wise_loading(index)
    for layer in tensors(pool):
        assert torch.equal(layer[TARGET], layer[SOURCE])
        assert torch.equal(layer[TARGET + 256], layer[SOURCE])


def test_lookup_lengths_end_at_the_first_missing_page(linker: Make) -> None:
    one = linker(mha())
    offloaded(one)
    key = bytes.fromhex(hashes(TOKENS, PAGE)[4])
    assert one._client.remove(one._agent.namespace, [key]) == [True]
    assert one.lookup("r", transfer()) == [1, 2, 3, 4]


def test_looked_up_pages_are_not_evicted(arguments: SimpleNamespace, linker: Make) -> None:
    """The node has room for 32 pages; 200 others are saved between lookup and load."""
    pool = mha()
    fill(pool)
    with harness.start_node("--ram-bytes", "512KiB", "--extent-bytes", "64KiB") as small:
        one = linker(pool, address=small.address)
        assert offloaded(one)
        assert one.lookup("r", transfer()) == list(range(1, 11))
        for number in range(20):
            offloaded(one, tokens=[1000 + number, *TOKENS[1:]])
        assert one.lookup("other", transfer(tokens=[1000, *TOKENS[1:]])) == []  # the node did evict
        assert one.load("r", transfer(TARGET))
        assert one.finish_layer_wise_loading(one.start_layer_wise_loading())
        for layer in tensors(pool):
            assert torch.equal(layer[TARGET], layer[SOURCE])
        one.close()


def test_failed_load_is_reported_and_ends_waits(linker: Make) -> None:
    one = linker(mha())
    offloaded(one)
    assert one.load("r", transfer(TARGET))
    one._client.remove_namespace(one._agent.namespace)
    index = one.start_layer_wise_loading()
    one.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        one.layer_done_counter.wait_until(layer)  # does not hang
    assert one.finish_layer_wise_loading(index) is False


def damage(one: Any, key: bytes) -> None:
    """Flip a bit of a page directly in the node's memory."""
    with (
        Client(ClientConfig(address=one._client.config.address, wire="shm")) as client,
        client.open_get(one._agent.namespace, [key]) as slots,
    ):
        slots.arena.memory[slots.offsets[0] + 77] ^= 1


@pytest.mark.parametrize("fate", ["gone", "damaged"])
@pytest.mark.parametrize("page", [1, 4, 9])
@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_load_with_one_page_missing_fails(linker: Make, wire: str, page: int, fate: str) -> None:
    """SGLang inserts and offloads loads reported as done, so empty slots would poison the store."""
    pool = mha()
    fill(pool)
    one = linker(pool, wire=wire)
    assert offloaded(one)
    assert one.lookup("r", transfer()) == list(range(1, 11))
    key = bytes.fromhex(hashes(TOKENS, PAGE)[page])
    if fate == "gone":
        assert one._client.remove(one._agent.namespace, [key]) == [True]
    else:
        damage(one, key)
    assert one.load("r", transfer(TARGET))
    index = one.start_layer_wise_loading()
    one.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        one.layer_done_counter.wait_until(layer)  # does not hang
    assert one.finish_layer_wise_loading(index) is False


def test_failed_batch_ends_after_its_last_write(
    linker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One load of the batch fails at once while the other one is still writing."""
    one = linker(mha())
    offloaded(one)
    transfer_of_agent, written = one._agent._transfer, []
    inner = transfer_of_agent.scatter

    def slow(*args: Any, **more: Any) -> None:
        threading.Event().wait(0.5)
        inner(*args, **more)
        written.append(True)

    monkeypatch.setattr(transfer_of_agent, "scatter", slow)
    assert one.load("a", transfer(TARGET + 256, tokens=[7, *TOKENS[1:]]))
    assert one.load("b", transfer(TARGET))
    assert one.finish_layer_wise_loading(one.start_layer_wise_loading()) is False
    assert written == [True]


def test_hung_node_fails_loads_and_lookups_in_time(linker: Make) -> None:
    with harness.start_node("--ram-bytes", "16MiB", "--extent-bytes", "1MiB") as own:
        options = {
            "address": own.address,
            "lookup_timeout_s": 0.3,
            "load_timeout_s": 0.5,
            "save_timeout_s": 0.5,
        }
        one = linker(mha(), timeout_per_ki_token_s=0.0, **options)
        offloaded(one)
        with harness.stopped(own):
            assert one.load("r", transfer(TARGET))
            assert one.finish_layer_wise_loading(one.start_layer_wise_loading()) is False
            assert one.lookup("r", transfer()) == []
            assert offloaded(one, tokens=[7, *TOKENS[1:]]) is False
        one.close()


def test_queued_load_is_cancelled_once(linker: Make) -> None:
    one = linker(mha())
    assert one.load("r", transfer(TARGET))
    assert one.cancel_queued_load("r") is True
    assert one.cancel_queued_load("r") is False
    assert one.start_layer_wise_loading() == -1
    assert one.load("r", []) is False


def test_offloads_complete_in_order(linker: Make) -> None:
    one = linker(mha())
    for number in range(20):
        assert one.offload(transfer(SOURCE, tokens=[number, *TOKENS[1:]]))
    results = []
    while len(results) < 20:
        results += [one.pop_completed_offload() for _ in range(one.num_completed_offloads())]
        threading.Event().wait(0.01)
    assert results == [True] * 20
    assert one.num_completed_offloads() == 0


def test_offload_without_a_new_thread_fails_without_raising(
    linker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the exception ended the engine's scheduler."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    subject = linker(mha())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert subject.offload(transfer(SOURCE))
        while not subject.num_completed_offloads():
            pass
    assert not subject.pop_completed_offload()


def test_offload_that_breaks_fails_without_raising(
    linker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the scheduler got the exception when it took the result."""

    def fail(*_: object) -> None:
        raise MemoryError

    subject = linker(mha())
    monkeypatch.setattr(subject._agent, "save", fail)
    assert subject.offload(transfer(SOURCE))
    while not subject.num_completed_offloads():
        threading.Event().wait(0.01)
    assert not subject.pop_completed_offload()


def test_reset_cancels_pending_calls(linker: Make) -> None:
    one = linker(mha())
    offloaded(one)
    one.load("a", transfer(TARGET))
    one.start_layer_wise_loading()
    one.load("b", transfer(TARGET))
    one.offload(transfer(SOURCE, tokens=[7, *TOKENS[1:]]))
    one.reset()
    assert one.num_completed_offloads() == 0
    assert one.cancel_queued_load("b") is False
    assert one.lookup("r", transfer()) == list(range(1, 11))


def test_other_weights_miss(linker: Make, arguments: SimpleNamespace) -> None:
    offloaded(linker(mha()))
    assert linker(mha()).lookup("r", transfer()) == list(range(1, 11))
    arguments.kv_cache_dtype = "fp8_e4m3"
    assert linker(mha()).lookup("r", transfer()) == []


def test_weight_update_with_a_version_makes_old_pages_miss(
    linker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ["1"]
    monkeypatch.setattr(adapter, "weight_version", lambda: version[0])
    one = linker(mha())
    offloaded(one)
    one.reset()
    assert one.lookup("r", transfer()) == list(range(1, 11))
    version[0] = "2"
    one.reset()  # SGLang flushes
    assert one.lookup("r", transfer()) == []
    offloaded(one)
    assert one.lookup("r", transfer()) == list(range(1, 11))


@pytest.mark.parametrize(
    ("pool", "more", "message"),
    [
        (object, {}, "not object"),
        (lambda: dsa()[0].device_pool, {}, "not DSATokenToKVPool: use --enable-hierarchical"),
        (mha, {"components": {ComponentType.FULL, ComponentType.SWA}}, "this model has swa too"),
        (mla, {"components": {ComponentType.FULL, ComponentType.MAMBA}}, "this model has mamba"),
        (
            mha,
            {"components": {ComponentType.FULL, ComponentType.MAMBA, ComponentType.SWA}},
            "has mamba and swa too: use --enable-hierarchical-cache",
        ),
        (mha, {"drafts": (object(),)}, "this model has a draft model's KV too"),
        (mha, {"hold": 3}, "unknown option 'hold'"),
        (mha, {"hold_s": 0.0}, "hold_s=0.0"),
    ],
)
def test_unsupported_configuration_ends_the_start(
    linker: Make, pool: Any, more: dict[str, Any], message: str
) -> None:
    made = SimpleNamespace(start_layer=0) if pool is object else pool()
    with pytest.raises(ConfigError, match="SimpleNamespace" if pool is object else message):
        linker(made, **more)


def test_reset_drops_offloads_that_have_not_begun(linker: Make) -> None:
    """Regression: a reset waited for the whole queue, each offload with its own deadline."""
    subject, gate, begun = linker(mha()), threading.Event(), threading.Event()
    save = subject._agent.save

    def late(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert gate.wait(60.0)
        return save(*arguments, **named)

    subject._agent.save = late
    for number in range(5):
        assert subject.offload(transfer(SOURCE, tokens=[number, *TOKENS[1:]]))
    assert begun.wait(60.0)
    waiting = [done for done, _ in subject._pending][1:]
    threading.Timer(0.2, gate.set).start()
    subject.reset()
    assert all(done.cancelled() for done in waiting)
    assert subject.num_completed_offloads() == 0
