"""The disk tier: pages in extent files, small rows in RocksDB, one writer behind the puts.

in: pages that the RAM tier offers; out: pages read back into arena slots, checked on the way.
"""
