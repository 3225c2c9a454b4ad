"""Pools in host memory, whose units are whole pages: calls that wait (pages), a tier below an engine's own cache
(rows), the copies for both (unit_copies), and pages that need none
(unit_pieces)."""
