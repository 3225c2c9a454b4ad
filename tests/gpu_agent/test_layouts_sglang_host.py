"""SGLang's host pools as pools of pages, with stand-ins for its own classes."""

from typing import Any

import pytest
import torch

from gpu_agent import KVPool
from gpu_agent.host.slot_copies import SlotCopies
from gpu_agent.layouts.sglang import host_pool, page_numbers
from kvstore.errors import InvalidRequest

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 6, 3, 2, 8
# Layout -> (shape of the memory, dimension of slots or pages, size of a page in that dimension).
ORDERS = {
    "layer_first": ((2, LAYERS, PAGE * PAGES, HEADS, DIM), 2, PAGE),
    "page_first": ((2, PAGE * PAGES, LAYERS, HEADS, DIM), 1, PAGE),
    "page_first_direct": ((2, PAGES, LAYERS, PAGE, HEADS, DIM), 1, 1),
    "page_head": ((2, PAGES, HEADS, PAGE, LAYERS, DIM), 1, 1),
    "latents": ((LAYERS, PAGE * PAGES, 1, DIM), 1, PAGE),
}


class Views:
    """A host pool that returns pages as views of one tensor."""

    page_size, size = PAGE, PAGE * PAGES

    def __init__(self, layout: str) -> None:
        shape, self._dim, self._step = ORDERS[layout]
        self.memory = (
            torch.randint(0, 256, (*shape, 2), dtype=torch.uint8).view(torch.bfloat16).squeeze(-1)
        )

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.memory.narrow(self._dim, index // PAGE * self._step, self._step)
        return page.flatten() if flat else page


class Segments:
    """A host pool that gives addresses of pages: K and V of different widths in separate memory."""

    page_size, size = PAGE, PAGE * PAGES

    def __init__(self, gap: int = 0) -> None:
        self.parts = [
            torch.randint(0, 256, (PAGES, width + gap), dtype=torch.uint8) for width in (24, 40)
        ]
        self.widths = (24, 40)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[::PAGE] // PAGE).tolist()
        return [part[page].data_ptr() for page in pages for part in self.parts], list(
            self.widths
        ) * len(pages)


class Copies(Segments):
    """A host pool whose pages are copies, not views of its memory."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([part[index // PAGE][:8] for part in self.parts])


class Nothing:
    page_size, size = PAGE, PAGE * PAGES

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        raise ValueError("unsupported layout")

    get_page_buffer_meta = get_data_page


def gathered(pool: KVPool, page: int) -> bytes:
    target = torch.zeros(pool.layout.page_nbytes, dtype=torch.uint8)
    SlotCopies().gather(pool, pool.unit_table(torch.tensor([page]), 1), [target], None)
    return target.numpy().tobytes()


@pytest.mark.parametrize("layout", ORDERS)
def test_page_equals_the_engines_flat_page(layout: str) -> None:
    host = Views(layout)
    pool, flat = host_pool(host)
    assert flat
    assert pool.layout.page_tokens == PAGE
    for page in range(PAGES):
        expected = host.get_data_page(page * PAGE).view(torch.uint8).numpy().tobytes()
        assert gathered(pool, page) == expected


@pytest.mark.parametrize("layout", ORDERS)
def test_scattered_page_equals_the_engines_flat_page(layout: str) -> None:
    host = Views(layout)
    pool, _ = host_pool(host)
    page = torch.randint(0, 256, (pool.layout.page_nbytes,), dtype=torch.uint8)
    SlotCopies().scatter(pool, pool.unit_table(torch.tensor([4]), 1), [page], None)
    assert torch.equal(host.get_data_page(4 * PAGE).view(torch.uint8), page)


@pytest.mark.parametrize("host", [Segments(), Segments(gap=8), Copies()])
def test_segments_of_a_page_are_concatenated(host: Any) -> None:
    pool, flat = host_pool(host)
    assert not flat
    assert pool.layout.page_nbytes == 64
    for page in range(PAGES):
        expected = b"".join(
            part[page][:width].numpy().tobytes()
            for part, width in zip(host.parts, host.widths, strict=True)
        )
        assert gathered(pool, page) == expected


def test_orders_of_equal_size_have_different_layouts() -> None:
    layouts = {host_pool(Views(layout))[0].layout.fingerprint for layout in ORDERS}
    assert len(layouts) == len(ORDERS)


def test_pool_without_page_views_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"Nothing describes no pages: unsupported layout"):
        host_pool(Nothing())


def test_slots_are_numbered_by_page() -> None:
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    assert page_numbers(slots, 4, 2).tolist() == [2, 0]
    assert page_numbers(torch.tensor([5, 3]), 1, 2).tolist() == [5, 3]


@pytest.mark.parametrize(
    ("slots", "count"),
    [([0, 1, 2, 4], 1), ([2, 3, 4, 5], 1), ([0, 1, 2], 1), ([0, 1, 2, 3], 2), ([3, 2, 1, 0], 1)],
)
def test_slots_of_incomplete_pages_are_refused(slots: list[int], count: int) -> None:
    with pytest.raises(InvalidRequest):
        page_numbers(torch.tensor(slots), 4, count)
