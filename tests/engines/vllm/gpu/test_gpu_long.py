"""A prompt of 128k tokens on a GPU: loaded blocks equal the computed ones byte by byte."""

from collections.abc import Callable
from typing import Any

from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from gpu_answers import stored
from restartable_node import RestartableNode

TOKENS = (1 << 17) + 7  # 128 MiB of KV of the tiny model, in 4,096 blocks
LONG: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": TOKENS + 64,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": None,
}


def test_prompt_of_128k_tokens_loads_exactly(
    on_gpu: Callable[..., EngineHandle], models: Callable[..., str], store: RestartableNode
) -> None:
    model = models("llama", dtype="bfloat16", max_position_embeddings=1 << 18)
    writer, reader = (
        on_gpu(role, model=model, store={"address": store.address}, **LONG)
        for role in ("writer", "reader")
    )
    one = prompt(1, TOKENS)
    stored(writer, one)
    computed = writer.ask("blocks", prompt=one)["digests"]
    assert len(set(computed)) == TOKENS // 32
    assert None not in computed
    expected = writer.generate(one)
    found = reader.alone(one)
    assert cached(found) == cached(expected) == [TOKENS // 32 * 32]
    assert reader.ask("blocks", prompt=one)["digests"] == computed
    assert answers(found) == answers(expected)
