"""Implement the command line, `kvstore`.

The only place that imports typer and rich (extra `cli`).
"""
