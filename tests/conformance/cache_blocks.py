"""Read and write blocks of an engine's KV cache, in the worker of each rank.

Every function is sent to all workers by `collective_rpc`. It finds a layer's tensors where vLLM
binds them, so it also sees those that share memory with other layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

# The byte of poison: 3156 in float32, 3152 in bfloat16, finite in each type.
POISON = 0x45


def tensors_of(worker: Any) -> dict[str, list[torch.Tensor]]:
    """Return each layer's cache tensors; the first axis is a multiple of the blocks."""
    config = worker.model_runner.vllm_config.compilation_config
    found = {}
    for name, layer in config.static_forward_context.items():
        tensors = list(_flat(getattr(layer, "kv_cache", None)))
        if tensors:
            found[name] = tensors
    return found


def _flat(cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        if cache.numel():
            yield cache
    elif isinstance(cache, list | tuple):
        for part in cache:
            yield from _flat(part)


def rows_of(tensor: torch.Tensor, blocks: Sequence[int], total: int) -> list[int]:
    """Return the rows of a tensor that belong to blocks.

    A kernel's block may be a part of a block of the cache manager. Raises ValueError if the first
    axis does not count blocks.
    """
    parts, rest = divmod(tensor.shape[0], total)
    if rest or not parts:
        raise ValueError(f"a cache tensor of shape {tuple(tensor.shape)} has no {total} blocks")
    return [number * parts + part for number in blocks for part in range(parts)]


def fill(worker: Any, blocks: Sequence[int], total: int) -> None:
    """Fill blocks with poison."""
    for tensors in tensors_of(worker).values():
        for tensor in tensors:
            rows = torch.tensor(rows_of(tensor, blocks, total), device=tensor.device)
            plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            size = plain.element_size()
            value = torch.tensor([POISON] * size, dtype=torch.uint8).view(plain.dtype)[0]
            plain[rows] = value.to(tensor.device)
    wait_for_device(worker)


def wait_for_device(worker: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def tamper(worker: Any, how: str, groups: Sequence[Sequence[Any]], total: int) -> bool:
    """Change cached blocks; return False if the model has nothing of this kind.

    `groups`: of each group its kind, its layers and the blocks of a prompt in order.
    """
    kind = "state" if how.endswith(("state", "states")) else "attention"
    caches = tensors_of(worker)
    # The group with the most cached blocks: of a window only the last ones are cached.
    candidates = [group for group in groups if group[0] == kind and group[2]]
    if not candidates:
        return False
    _, layers, blocks = max(candidates, key=lambda group: len(group[2]))
    tensors = [tensor for name in layers for tensor in caches.get(name, [])]
    last = blocks[-1]
    if how.startswith("zero"):
        for tensor in tensors:
            tensor[rows_of(tensor, [last], total)] = 0
    elif how == "swap layers":
        if len(layers) < 2:
            return False
        for one, other in zip(caches[layers[0]], caches[layers[1]], strict=True):
            for number in blocks:
                _swap(one, other, rows_of(one, [number], total), rows_of(other, [number], total))
    else:
        if len(blocks) < 2:
            return False
        # Two states change places; a block of attention takes the place of the next.
        for tensor in tensors:
            mine, yours = rows_of(tensor, [blocks[-2]], total), rows_of(tensor, [last], total)
            if kind == "state":
                _swap(tensor, tensor, mine, yours)
            else:
                tensor[yours] = tensor[mine]
    wait_for_device(worker)
    return True


def _swap(one: torch.Tensor, other: torch.Tensor, mine: list[int], yours: list[int]) -> None:
    kept = one[mine].clone()
    one[mine] = other[yours]
    other[yours] = kept
