"""Traces, replays, benchmarks, and throwaway nodes to run them against: what measures the store,
not what it is.

in: a `Client` and a trace or a page size; out: figures for `kvstore bench`, `kvstore replay` and
benchmarks/.
"""
