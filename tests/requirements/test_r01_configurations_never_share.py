"""R1: two configurations that differ in model, revision, dtype, quantisation, LoRA, layout or page
size never hit each other.
"""

from itertools import permutations

import pytest

from kvstore import Client, LayerGroup, Namespace, PageLayout, Plane, prefix_hashes
from kvstore.tools.trace import page_content


def layout(
    dtype: str = "bfloat16", heads: int = 2, page_tokens: int = 16, order: str = "kv"
) -> PageLayout:
    planes = tuple(Plane(name, dtype, (heads, 8)) for name in order)
    return PageLayout(page_tokens, (LayerGroup("full", (0, 1), planes),))


BASE = Namespace("llama", layout(), revision="main")
CONFIGURATIONS = {
    "base": BASE,
    "model": Namespace("qwen", layout(), revision="main"),
    "revision": Namespace("llama", layout(), revision="v2"),
    "dtype of the same size": Namespace("llama", layout("float16"), revision="main"),
    "quantised": Namespace("llama", layout("float8_e4m3fn"), revision="main"),
    "LoRA": Namespace("llama", layout(), revision="main", salt="lora:7"),
    "planes in another order": Namespace("llama", layout(order="vk"), revision="main"),
    "heads": Namespace("llama", layout(heads=4), revision="main"),
    "page size": Namespace("llama", layout(page_tokens=32), revision="main"),
    "same bytes, other split": Namespace("llama", layout(heads=1, page_tokens=32), revision="main"),
    "shard": Namespace("llama", layout(), revision="main", tp_rank=1, tp_size=2),
    "after a weight update": Namespace("llama", layout(), revision="main", epoch=1),
}


@pytest.fixture
def keys() -> list[bytes]:
    return prefix_hashes(range(64), 16)


def test_r01_each_configuration_finds_its_own_pages_only(client: Client, keys: list[bytes]) -> None:
    for writer in CONFIGURATIONS.values():
        client.put(
            writer,
            keys,
            [page_content(writer.digest, key, writer.layout.page_nbytes) for key in keys],
        )
        others = [other for other in CONFIGURATIONS.values() if other != writer]
        assert not any(any(client.lookup(other, keys).present) for other in others)
        assert client.remove(writer, keys) == [True] * len(keys)


def test_r01_one_key_has_other_bytes_in_each_configuration(
    client: Client, keys: list[bytes]
) -> None:
    for space in CONFIGURATIONS.values():
        client.put(
            space, keys, [page_content(space.digest, key, space.layout.page_nbytes) for key in keys]
        )
    for space in CONFIGURATIONS.values():
        buffers = [bytearray(space.layout.page_nbytes) for _ in keys]
        assert all(client.get(space, keys, buffers))
        assert buffers == [
            page_content(space.digest, key, space.layout.page_nbytes) for key in keys
        ]
        client.remove(space, keys)


def test_r01_no_two_configurations_have_one_digest() -> None:
    assert not [
        (a, b)
        for a, b in permutations(CONFIGURATIONS, 2)
        if CONFIGURATIONS[a].digest == CONFIGURATIONS[b].digest
    ]
