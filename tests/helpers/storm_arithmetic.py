"""The arithmetic of `storm_models`, and copies between host and device without kernels."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer, TransferCompletion

GARBAGE = 999_983
MODULUS = 1_000_003


def mark_of(index: int) -> int:
    """Return the mark of a layer's plane, which its cells carry."""
    return (index + 1) * 0x01010101


def attend(past: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return the values of `known`, which follow tokens with the values `past`."""
    seen, values = sum(past), []
    for token in known:
        values.append((seen * 31 + token + 1) % MODULUS)
        seen += values[-1]
    return values


def token_of(value: int) -> int:
    return value % 500 + 5


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Return what an engine without a cache generates."""
    known = list(prompt)
    for _ in range(count):
        known.append(token_of(attend([], known)[-1]))
    return known[len(prompt) :]


def cells_of(values: Sequence[int], mark: int) -> Any:
    """Return the cells `[tokens, 4]` of one layer's plane."""
    cells = np.zeros((len(values), 4), np.uint32)
    cells[:, 0] = values
    cells[:, 1] = ~cells[:, 0]
    cells[:, 3] = mark
    return cells


def state_of(values: Sequence[int], total: int = 0, count: int = 0) -> list[int]:
    """Return the state after tokens with these values, from the one before them."""
    total = (total + sum(values)) % (1 << 32)
    return [total, total ^ 0xFFFFFFFF, count + len(values)]


def values_of(raw: bytes, marks: Sequence[int], page: int) -> list[int] | None:
    """Return the values of a stored page's tokens, whatever the order of its layers.

    Returns None if a layer is missing or has garbage.
    """
    rows = np.frombuffer(raw, np.uint32).reshape(-1, 4)
    found = [rows[rows[:, 3] == mark] for mark in marks]
    if any(len(part) != page for part in found):
        return None
    first = found[0][:, 0]
    whole = all((part[:, 0] == first).all() and (part[:, 1] == ~part[:, 0]).all() for part in found)
    return [int(value) for value in first] if whole else None


class Later:
    """A copy that runs after `delay` queries of its event, or when the engine waits for it."""

    def __init__(self, copy: Callable[[], None], delay: int) -> None:
        self._copy: Callable[[], None] | None = copy
        self._delay = delay

    def query(self) -> bool:
        self._delay -= 1
        if self._delay < 0:
            self.synchronize()
        return self._copy is None

    def synchronize(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def elapsed_time(self, _: object) -> float:
        return 0.0


class Copies:
    """A replacement of SGLang's copy kernels between host and device; backups lag at random.

    `copy(transfer, to_host)` copies the slots of one pool.
    """

    def __init__(self, rng: random.Random, copy: Callable[[L2Transfer, bool], None]) -> None:
        self._rng, self._copy_one = rng, copy
        self.device_to_host_stream = self.host_to_device_stream = torch.cpu.Stream()

    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        done = Later(lambda: self._copy(transfers, to_host=True), self._rng.choice((0, 0, 1, 4)))
        return TransferCompletion(done, done, False)

    def submit_host_to_device(
        self,
        transfers: list[L2Transfer],
        *,
        transfer_layer_id_max: int,
        start_event: Any,
        on_layer_done: Any,
    ) -> TransferCompletion:
        self._copy(transfers, to_host=False)
        for layer in range(transfer_layer_id_max):
            on_layer_done(layer)
        done = Later(lambda: None, 0)
        return TransferCompletion(done, done, False)

    def _copy(self, transfers: list[L2Transfer], to_host: bool) -> None:
        for transfer in transfers:
            self._copy_one(transfer, to_host)
