"""Store KV pages that are NumPy arrays, and load them with another client.

kvstore-node --ram-bytes 1GiB &
python examples/numpy_pages.py localhost:7440
"""

import sys

import numpy as np

from kvstore import Client, LayerGroup, Namespace, PageLayout, Plane, prefix_hashes

PAGE_TOKENS, LAYERS, HEADS, HEAD_SIZE = 16, 4, 2, 8
UNIT = (HEADS, HEAD_SIZE)  # shape of one token in one layer
PLANES = (Plane("k", "float16", UNIT), Plane("v", "float16", UNIT))
LAYOUT = PageLayout(PAGE_TOKENS, (LayerGroup("attention", tuple(range(LAYERS)), PLANES),))


def main(address: str) -> int:
    """Store the pages of a prompt and return how many another client found."""
    tokens = list(range(100))  # six pages of 16 tokens; the last four tokens fill no page
    hashes = prefix_hashes(tokens, PAGE_TOKENS)
    pages = [
        np.random.default_rng(number).standard_normal(LAYOUT.page_nbytes // 2).astype(np.float16)
        for number in range(len(hashes))
    ]
    with Client(address) as writer:
        namespace = Namespace("numpy-example", LAYOUT, tenant=writer.tenant)
        writer.put(namespace, hashes, pages)
    with Client(address) as reader:
        found = reader.lookup(namespace, hashes).prefix_pages
        arrays = [np.empty_like(page) for page in pages[:found]]
        hits = reader.get(namespace, hashes[:found], arrays, prefix=True)
    equal = [np.array_equal(array, page) for array, page in zip(arrays, pages, strict=False)]
    print(f"stored {len(pages)} pages, found {found}, hits {sum(hits)}, equal {sum(equal)}")
    return sum(equal)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7440")
