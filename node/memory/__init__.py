"""The RAM tier: which page is in which slot of the arena, who may not lose it, who goes next.

in: keys from sessions, pages from the tier below (`lower_tier.py`); out: slots to write and read,
pages to keep below.
"""
