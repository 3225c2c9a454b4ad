"""Store pages on disk: extent files for bytes, small rows in RocksDB, one writer thread.

in: pages that the RAM tier offers; out: pages read back into arena slots, checked on the way.
"""
