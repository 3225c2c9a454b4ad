"""Pools in host memory, whose units are whole pages: calls that wait (pages), a tier below an engine's own cache
(page_table_tier), and the copies for both, or none where pages lie as they travel (slot_copies)."""
