"""Keep pages in RAM: slots of the arena, pins, eviction, promotion.

in: keys from sessions, pages from the tier below (`lower_tier.py`); out: slots to write and read,
pages to keep below.
"""
