"""Whole buffers by name, for an engine that owns no pool here (LMCache): lanes, deadlines, verified reads.

store: put, get, exists, remove --> parts (one namespace each) --> mover --> client
"""
