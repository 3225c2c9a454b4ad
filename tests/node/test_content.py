"""What the reply to a get says of pages beside their bytes, and what is remembered of those that
are gone.
"""

from types import SimpleNamespace
from typing import Any

from node.memory.page import FREED, MissReasons
from node.serving.session import ttls_ms


def test_a_page_that_ends_now_has_a_time_to_live_and_one_without_has_none() -> None:
    """0 means no limit: a copy of a page that ends now would stay for good."""
    pages: Any = [SimpleNamespace(expiry_s=expiry_s) for expiry_s in (0, 100, 101, 110, 99)]
    assert ttls_ms(pages, lambda: 100) == [0, 1000, 1000, 10_000, 1000]
    assert ttls_ms(pages[:1], lambda: 100) == []


def test_an_old_generation_of_reasons_is_freed_bit_by_bit() -> None:
    miss_reasons = MissReasons(10)
    for number in range(31):
        miss_reasons.remember(b"space", bytes([number]), "evicted")
    assert len(miss_reasons._gone) == 10 - FREED
    miss_reasons.remember(b"space", b"more", "evicted")
    assert len(miss_reasons._gone) == 10 - 2 * FREED
    assert miss_reasons.reasons(b"space", [bytes([30]), bytes([25]), bytes([15])]) == {
        "evicted": 2,
        "absent": 1,
    }
