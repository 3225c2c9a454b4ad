"""Models of `storm_engine`: SGLang's pools of a kind, and arithmetic in place of layers.

The KV of a token is four numbers in each layer of each pool: value, its complement, 0, a mark of
the layer. A token's value depends on the values of all tokens before it. `past` reads them as the
layers of a model would:

    full attention    the values of all earlier tokens, from the KV pool (K and V, or latents)
    sparse attention  the same, and from the indexer's pages
    sliding window    the same, and of the last WINDOW tokens from the window's pool
    recurrent         the same, and their sum from the request's state, which knows how many tokens
                      it has seen

A slot with wrong data gives GARBAGE, which spreads to all later tokens.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from storm_arithmetic import GARBAGE, cells_of, mark_of, state_of, values_of

ROWS, CONTEXT, WINDOW, STATES = 8, 256, 8, 40
LAYERS = 2
INDEX_NBYTES = 132  # of one token in an indexer's page: its key, and a scale after all keys


class Model:
    """Full attention with K and V; the other models change what differs.

    `page`: tokens of a page; `scale`: how much longer prompts are than those of pages of 4 tokens.
    """

    page, scale, slots = 4, 1, 160
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    window: int | None = None

    def __init__(self) -> None:
        self.kv: Any = self._pool()
        self.rows: Any = self._rows()
        self.allocator: Any = self._allocator()

    def _pool(self) -> Any:
        return MHATokenToKVPool(
            self.slots, self.page, torch.bfloat16, 1, 8, LAYERS, "cpu", False, start_layer=0
        )

    def _rows(self) -> Any:
        return ReqToTokenPool(ROWS, CONTEXT * self.scale, "cpu", False)

    def _allocator(self) -> Any:
        return PagedTokenToKVPoolAllocator(
            self.slots, self.page, torch.bfloat16, "cpu", self.kv, False
        )

    # ---- pages -------------------------------------------------------------------------------

    def planes(self) -> list[torch.Tensor]:
        """Return the KV pool's tensors, one per layer and plane."""
        return [
            plane for pair in zip(self.kv.k_buffer, self.kv.v_buffer, strict=True) for plane in pair
        ]

    def past(self, req: Any, slots: np.ndarray) -> list[int]:
        """Return the values of the tokens at these slots, all earlier ones of a request."""
        return read(self.planes(), slots)

    def write(self, req: Any, slots: np.ndarray, values: Sequence[int]) -> None:
        """Write the values of new tokens."""
        write(self.planes(), slots, values)

    def begin(self, req: Any) -> None:
        """Prepare a request's state in front of a forward pass."""

    def not_admitted(self, req: Any) -> None:
        """Return the state's slot of a request that was matched but not admitted."""

    # ---- copies between a device's pool and the host's ---------------------------------------

    def pairs(self, transfer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (tensor of the device, tensor of the host), both indexed by slots."""
        device, host = transfer.device_pool, transfer.host_pool
        return [
            (buffer, host.kv_buffer[kind, :, layer])
            for kind, buffers in enumerate((device.k_buffer, device.v_buffer))
            for layer, buffer in enumerate(buffers)
        ]

    def copy(self, transfer: Any, to_host: bool) -> None:
        """Copy slots of one pool, as SGLang's kernels do."""
        host_slots = transfer.host_indices.long()
        device_slots = transfer.device_indices.long()
        for device, host in self.pairs(transfer):
            if to_host:
                host[host_slots] = device[device_slots]
            else:
                device[device_slots] = host[host_slots]

    # ---- for tests ---------------------------------------------------------------------------

    def leftovers(self, cache: Any) -> list[str]:
        """Return the slots that an idle engine should not hold."""
        free = self.allocator.available_size() + cache.evictable_size()
        return [] if free == self.slots else [f"{free} of {self.slots} slots are free or evictable"]

    def wrong_page(self, pool: str, raw: bytes, values: Sequence[int]) -> bool:
        """Return whether a stored page does not end a prompt whose tokens have these values."""
        return values_of(raw, self._marks(pool), self.page) != list(values[-self.page :])

    def _marks(self, pool: str) -> list[int]:
        return [mark_of(index) for index in range(len(self.planes()))]


class Latents(Model):
    """MLA: one latent per token and layer."""

    def _pool(self) -> Any:
        return MLATokenToKVPool(
            self.slots, self.page, torch.bfloat16, 6, 2, LAYERS, "cpu", False, start_layer=0
        )

    def planes(self) -> list[torch.Tensor]:
        return list(self.kv.kv_buffer)

    def pairs(self, transfer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (buffer, transfer.host_pool.kv_buffer[:, layer])
            for layer, buffer in enumerate(transfer.device_pool.kv_buffer)
        ]


class Window(Model):
    """A layer with full attention and one with a sliding window, each with a pool of its own."""

    components = (ComponentType.FULL, ComponentType.SWA)
    window = WINDOW

    def _pool(self) -> Any:
        return SWAKVPool(
            self.slots, self.slots // 2, self.page, torch.bfloat16, 1, 8, [1], [0], "cpu"
        )

    def _allocator(self) -> Any:
        return SWATokenToKVPoolAllocator(
            self.slots, self.slots // 2, self.page, torch.bfloat16, "cpu", self.kv, False
        )

    def planes(self) -> list[torch.Tensor]:
        pool = self.kv.full_kv_pool
        return [pool.k_buffer[0], pool.v_buffer[0]]

    def _window_planes(self) -> list[torch.Tensor]:
        pool = self.kv.swa_kv_pool
        return [pool.k_buffer[0], pool.v_buffer[0]]

    def _translated(self, slots: np.ndarray) -> np.ndarray:
        found = self.allocator.translate_loc_from_full_to_swa(torch.from_numpy(slots))
        return np.asarray(found.long().numpy())

    def past(self, req: Any, slots: np.ndarray) -> list[int]:
        values = read(self.planes(), slots)
        last = slots[-self.window :] if self.window else slots
        near = read(self._window_planes(), self._translated(last), first_mark=2)
        return [*values[: len(values) - len(near)], *near] if len(near) else values

    def write(self, req: Any, slots: np.ndarray, values: Sequence[int]) -> None:
        super().write(req, slots, values)
        write(self._window_planes(), self._translated(slots), values, first_mark=2)

    def leftovers(self, cache: Any) -> list[str]:
        free = self.allocator.full_available_size() + cache.full_evictable_size()
        near = self.allocator.swa_available_size() + cache.swa_evictable_size()
        return [
            f"{count} of {size} slots of {name} are free or evictable"
            for name, count, size in (
                ("full attention", free, self.slots),
                ("the window", near, self.slots // 2),
            )
            if count != size
        ]

    def _marks(self, pool: str) -> list[int]:
        return [mark_of(index) for index in ((2, 3) if pool == "swa" else (0, 1))]


class Sparse(Latents):
    """DSA: latents, and an indexer whose pages have all keys first and then all scales."""

    page, scale, slots = 64, 16, 64 * 40

    def _pool(self) -> Any:
        return DSATokenToKVPool(
            self.slots, self.page, 512, torch.float8_e4m3fn, 64, LAYERS, "cpu", 128, False, 656,
            start_layer=0, end_layer=LAYERS,
        )  # fmt: skip

    def past(self, req: Any, slots: np.ndarray) -> list[int]:
        values, index = read(self.planes(), slots), self._index(slots)
        return [
            value if value == key else GARBAGE for value, key in zip(values, index, strict=True)
        ]

    def write(self, req: Any, slots: np.ndarray, values: Sequence[int]) -> None:
        super().write(req, slots, values)
        for layer, keys in enumerate(self._keys()):
            keys[slots // self.page, slots % self.page] = cells_of(values, mark_of(LAYERS + layer))

    def _keys(self) -> list[np.ndarray]:
        """Return, for each layer, the first 16 bytes of all keys: `[pages, 64, 4]` numbers."""
        return [
            pages.view(torch.uint8)[:, : 128 * self.page].view(-1, self.page, 128)[:, :, :16]
            .numpy().view(np.uint32)
            for pages in self.kv.index_k_with_scale_buffer
        ]  # fmt: skip

    def _index(self, slots: np.ndarray) -> list[int]:
        rows = [keys[slots // self.page, slots % self.page] for keys in self._keys()]
        return values_in(rows, [mark_of(LAYERS + layer) for layer in range(LAYERS)])

    def copy(self, transfer: Any, to_host: bool) -> None:
        if not hasattr(transfer.host_pool, "index_k_with_scale_buffer"):
            super().copy(transfer, to_host)
            return
        host_pages = transfer.host_indices.long()[:: self.page] // self.page
        device_pages = transfer.device_indices.long()[:: self.page] // self.page
        kept = transfer.host_pool.index_k_with_scale_buffer
        for layer, pages in enumerate(self.kv.index_k_with_scale_buffer):
            host = kept[:, layer].view(kept.shape[0], -1)
            if to_host:
                host[host_pages] = pages[device_pages]
            else:
                pages[device_pages] = host[host_pages]

    def wrong_page(self, pool: str, raw: bytes, values: Sequence[int]) -> bool:
        if pool != "indexer":
            return super().wrong_page(pool, raw, values)
        layers = np.frombuffer(raw, np.uint8).reshape(LAYERS, self.page * INDEX_NBYTES)
        keys = layers[:, : 128 * self.page].reshape(LAYERS, self.page, 128)[:, :, :16]
        rows = [np.ascontiguousarray(part).view(np.uint32) for part in keys]
        found = values_in(rows, [mark_of(LAYERS + layer) for layer in range(LAYERS)])
        return found != list(values[-self.page :])


class Recurrent(Model):
    """Full attention beside recurrent layers, whose state is cached where a request has ended.

    Without SGLang's extra buffer a page has one token.
    """

    page = 1
    components = (ComponentType.FULL, ComponentType.MAMBA)

    def _rows(self) -> Any:
        params = SimpleNamespace(
            shape=SimpleNamespace(conv=[(2, 4)], temporal=(1, 1, 4)),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            is_kda=False,
        )
        self.rows = HybridReqToTokenPool(
            size=ROWS, mamba_size=STATES, mamba_spec_state_size=0, max_context_len=CONTEXT,
            device="cpu", enable_memory_saver=False, cache_params=params, mamba_layer_ids=[1, 2],
            enable_mamba_extra_buffer=False, enable_overlap_schedule=False,
        )  # fmt: skip
        self.kv = HybridLinearKVPool(
            self.slots, torch.bfloat16, self.page, 1, 8, [0, 3], "cpu", self.rows.mamba_pool
        )
        return self.rows

    def _pool(self) -> Any:
        return None  # it needs the rows' states

    def _allocator(self) -> Any:
        return TokenToKVPoolAllocator(self.slots, torch.bfloat16, "cpu", self.kv, False)

    def planes(self) -> list[torch.Tensor]:
        pool = self.kv.full_kv_pool
        return [plane for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for plane in pair]

    def begin(self, req: Any) -> None:
        """Copy or clear the state, as `_collect_deferred_mamba_cow_and_clear` has it done."""
        own = req.kv.mamba_pool_idx
        if req.kv.mamba_cow_src_index is not None:
            self.rows.mamba_pool.copy_from(req.kv.mamba_cow_src_index, own.unsqueeze(0))
        elif req.kv.mamba_needs_clear:
            self.rows.mamba_pool.clear_slots(own.unsqueeze(0))
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False

    def not_admitted(self, req: Any) -> None:
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if req.kv.holds_mamba:
            self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None

    def _states(self) -> list[np.ndarray]:
        """Return each layer's states, temporal and convolution: `[slots, 4]` numbers."""
        cache = self.rows.mamba_pool.mamba_cache
        return [
            part[layer].reshape(part.shape[1], -1).view(torch.uint8).numpy()[:, :16].view(np.uint32)
            for part in (cache.temporal, *cache.conv)
            for layer in range(2)
        ]

    def past(self, req: Any, slots: np.ndarray) -> list[int]:
        values = read(self.planes(), slots)
        own = int(req.kv.mamba_pool_idx)
        right = state_of(values)
        whole = all(
            list(part[own]) == ([0] * 4 if not len(slots) else [*right, mark_of(16 + index)])
            for index, part in enumerate(self._states())
        )
        return values if whole else [GARBAGE] * len(values) or [GARBAGE]

    def write(self, req: Any, slots: np.ndarray, values: Sequence[int]) -> None:
        super().write(req, slots, values)
        for index, part in enumerate(self._states()):
            own = part[int(req.kv.mamba_pool_idx)]
            own[:3] = state_of(values, int(own[0]), int(own[2]))
            own[3] = mark_of(16 + index)

    def copy(self, transfer: Any, to_host: bool) -> None:
        if not hasattr(transfer.host_pool, "temporal_buffer"):
            super().copy(transfer, to_host)
            return
        host_slots, device_slots = transfer.host_indices.long(), transfer.device_indices.long()
        cache = self.rows.mamba_pool.mamba_cache
        kept = (transfer.host_pool.temporal_buffer, *transfer.host_pool.conv_buffer)
        for device, host in zip((cache.temporal, *cache.conv), kept, strict=True):
            for layer in range(2):
                if to_host:
                    host[host_slots, layer, 0] = device[layer, device_slots]
                else:
                    device[layer, device_slots] = host[host_slots, layer, 0]

    def leftovers(self, cache: Any) -> list[str]:
        found = []
        free = self.allocator.available_size() + cache.full_evictable_size()
        if free != self.slots:
            found.append(f"{free} of {self.slots} slots are free or evictable")
        states = self.rows.mamba_allocator.available_size() + cache.mamba_evictable_size()
        if states != STATES:
            found.append(f"{states} of {STATES} states are free or evictable")
        return found

    def wrong_page(self, pool: str, raw: bytes, values: Sequence[int]) -> bool:
        if pool != "mamba":
            return super().wrong_page(pool, raw, values)
        parts = np.frombuffer(raw, np.uint32).reshape(4, -1)[:, :4]
        return [list(part) for part in parts] != [
            [*state_of(values), mark_of(16 + index)] for index in range(4)
        ]


MODELS: dict[str, type[Model]] = {
    "mha": Model,
    "mla": Latents,
    "swa": Window,
    "dsa": Sparse,
    "mamba": Recurrent,
}


def _cells(planes: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the first four numbers of each slot."""
    return [
        plane.view(torch.uint8).view(plane.shape[0], -1).numpy()[:, :16].view(np.uint32)
        for plane in planes
    ]


def read(planes: Sequence[torch.Tensor], slots: np.ndarray, first_mark: int = 0) -> list[int]:
    """Return the values at these slots, GARBAGE where a plane has wrong data."""
    marks = [mark_of(first_mark + index) for index in range(len(planes))]
    return values_in([cells[slots] for cells in _cells(planes)], marks)


def write(
    planes: Sequence[torch.Tensor], slots: np.ndarray, values: Sequence[int], first_mark: int = 0
) -> None:
    for index, cells in enumerate(_cells(planes)):
        cells[slots] = cells_of(values, mark_of(first_mark + index))


def values_in(parts: Sequence[np.ndarray], marks: Sequence[int]) -> list[int]:
    """Return the values of rows `[tokens, 4]`, equal in all parts; GARBAGE where they are not."""
    whole = np.ones(len(parts[0]), bool)
    for mark, part in zip(marks, parts, strict=True):
        whole &= (part[:, 3] == mark) & (part[:, 0] == parts[0][:, 0]) & (part[:, 1] == ~part[:, 0])
    return [int(value) for value in np.where(whole, parts[0][:, 0], GARBAGE)]
