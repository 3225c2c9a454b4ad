"""Store pages of host memory, where a unit of the pool is a whole page.

pages             blocking calls
page_table_tier   a tier below an engine's own cache
slot_copies       the copies for both, and pages that need none
"""
