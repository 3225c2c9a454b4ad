"""Measure stores: traces, replays, benchmarks, capacity plans and throwaway nodes.

Input is a `Client` and a trace or a page size; output are figures for `kvstore bench`, `kvstore
replay` and benchmarks/.
"""
