"""Measure stores: traces, replays, benchmarks, capacity plans and throwaway nodes.

in: a `Client` and a trace or a page size; out: figures for `kvstore bench`, `kvstore replay` and
benchmarks/.
"""
