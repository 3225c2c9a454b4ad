"""Times to live in the reply to a get, and the remembered reasons of misses."""

from types import SimpleNamespace
from typing import Any

from node.memory.page import FREED, MissReasons
from node.serving.session import ttls_ms


def test_expiring_page_has_a_nonzero_time_to_live() -> None:
    """0 means no limit, so a copy of a page that expires now would stay for ever."""
    pages: Any = [SimpleNamespace(expiry_s=expiry_s) for expiry_s in (0, 100, 101, 110, 99)]
    assert ttls_ms(pages, lambda: 100) == [0, 1000, 1000, 10_000, 1000]
    assert ttls_ms(pages[:1], lambda: 100) == []


def test_old_miss_reasons_are_freed_in_small_steps() -> None:
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
