"""What SGLang's own page keys cover, as docs/identity.md states."""

from typing import Any

import torch
from harness import PAGE
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

TOKENS = list(range(8 * PAGE))


def keys(tokens: list[int] = TOKENS, **extra: Any) -> list[str]:
    return list(get_storage_hash_str(RadixKey(tokens, **extra), None, page_size=PAGE))


def test_keys_cover_salt_and_lora() -> None:
    """The hash chain of a salted or adapted request has another start."""
    chains = [
        keys(),
        keys(cache_salt="tenant-a"),
        keys(extra_key="lora-1"),
        keys(cache_salt="lora-1"),
    ]
    assert len({key for chain in chains for key in chain}) == 4 * 8


def test_command_line_lora_id_covers_name_and_path() -> None:
    """The id of a LoRA does not cover its weights, so the namespace must cover them.

    A LoRA loaded later gets a random id.
    """
    assert LoRARef.deterministic_id("french", "/a") == LoRARef.deterministic_id("french", "/a")
    assert LoRARef.deterministic_id("french", "/a") != LoRARef.deterministic_id("french", "/b")
    one, two = (LoRARef(lora_name="french", lora_path="/a") for _ in range(2))
    assert one.lora_id != two.lora_id


def _padded(features: torch.Tensor) -> list[int]:
    """Return a prompt with an image of two pages after its first page."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=features)
    item.set_pad_value()
    return [*TOKENS[:PAGE], *item.padding_sequence(2 * PAGE), *TOKENS[PAGE:]]


def test_keys_cover_image_content() -> None:
    one, two = torch.zeros(4, 8), torch.zeros(4, 8)
    two[0, 0] = 1
    chains = [keys(_padded(features)) for features in (one, two, one.clone())]
    assert chains[0] == chains[2], "the keys must depend on content only"
    assert chains[0][0] == chains[1][0]
    assert not set(chains[0][1:]) & set(chains[1][1:])
    assert min(_padded(one)[PAGE : 3 * PAGE]) >= 1_000_000
    assert max(_padded(one)).bit_length() > 40, "too few bits of the hash to tell images apart"
