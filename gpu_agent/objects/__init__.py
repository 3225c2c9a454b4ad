"""Store whole buffers by name, for an engine without a pool here (LMCache).

put, get, exists, remove --> parts (one namespace each) --> bounded threads --> client
"""
