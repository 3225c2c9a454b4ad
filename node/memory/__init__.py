"""Keep pages in RAM: slots of the arena, pins, eviction, promotion.

Input are keys from sessions, and pages from lower tiers (`lower_tier.py`); output are slots to
write and read, and pages for lower tiers.
"""
