"""Describe groups of layers as an engine holds them; one or more of them make a pool.

Differences between engines are values of `GroupView`: which tensors, how many tokens one index
names, and which index space they use. Neither this module nor those above use a layout's name.

    pool_of(64, GroupView("kv", range(61), {"latent": latents}),
                GroupView("indexer", (0, 4, 8), {"keys": pages}, unit_tokens=64, space="page"))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_agent.pool import KVPool, dtype_name
from kvstore.errors import InvalidRequest
from kvstore.layout import LayerGroup, PageLayout, Plane


@dataclass(frozen=True)
class GroupView:
    """Layers whose tensors have the same shapes and dtypes, in the order of a page's bytes.

    `planes[name][i]`: tensor of layer `layers[i]`, `[slots, *unit_shape]` in any strides. `space`:
    groups that are indexed with the same numbers name the same space.
    """

    name: str
    layers: Sequence[int]
    planes: Mapping[str, Sequence[torch.Tensor]]
    unit_tokens: int = 1
    space: str = "token"

    def layer_group(self) -> LayerGroup:
        """Return the first layer's shapes and dtypes; `KVPool` checks that the others agree."""
        for plane, tensors in self.planes.items():
            if len(tensors) != len(self.layers) or not self.layers:
                raise InvalidRequest(
                    f"group {self.name} plane {plane}: {len(tensors)} tensors for "
                    f"{len(self.layers)} layers; give one tensor for each of at least one layer"
                )
        return LayerGroup(
            self.name, tuple(self.layers), tuple(self._plane(name) for name in self.planes)
        )

    def _plane(self, name: str) -> Plane:
        first = self.planes[name][0]
        try:
            return Plane(name, dtype_name(first.dtype), tuple(first.shape[1:]), self.unit_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"group {self.name} layer {self.layers[0]} plane {name}: {error}"
            ) from error


def pool_of(page_tokens: int, *groups: GroupView) -> KVPool:
    """Return the pool of all groups, in the order of a page.

    Raises InvalidRequest naming group, layer and plane of what does not fit.
    """
    layout = PageLayout(page_tokens, tuple(group.layer_group() for group in groups))
    tensors = {
        (group.name, layer, plane): tensor
        for group in groups
        for plane, tensors in group.planes.items()
        for layer, tensor in zip(group.layers, tensors, strict=True)
    }
    spaces = {(group.name, plane): group.space for group in groups for plane in group.planes}
    return KVPool(layout, tensors, spaces)


def check_shape(name: str, tensor: torch.Tensor, *sizes: int | str) -> None:
    """Raise InvalidRequest unless a tensor has these dimensions; a word stands for any size."""
    fits = tensor.dim() == len(sizes) and all(
        want == have
        for want, have in zip(sizes, tensor.shape, strict=True)
        if isinstance(want, int)
    )
    if not fits:
        raise InvalidRequest(
            f"{name}: shape is {list(tensor.shape)}, expected [{', '.join(map(str, sizes))}]"
        )
