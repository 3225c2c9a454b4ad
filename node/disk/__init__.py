"""Store pages on disk: extent files for bytes, small rows in RocksDB, one writer thread.

Input are pages that the RAM tier offers; output are pages read back into arena slots and verified.
"""
