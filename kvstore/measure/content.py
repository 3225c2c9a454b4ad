"""Page content that follows from the page's key, so that a reader can verify every byte.

    content = SHAKE-128(namespace digest || prefix hash), as many bytes as the page has

Every byte depends on the key and on its position: a page under the wrong key, a shifted, cut or
swapped piece of a page all differ. SHAKE-128 because every language has it and because here it
makes 0.6 GB/s, twice what Mersenne Twister's `randbytes` does.
"""

import hashlib


def page_content(namespace_digest: bytes, prefix_hash: bytes, nbytes: int) -> bytes:
    """The `nbytes` bytes that tools store under this key."""
    return hashlib.shake_128(namespace_digest + prefix_hash).digest(nbytes)
