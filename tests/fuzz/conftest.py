"""Fuzz tests of every parser of bytes from outside; `make fuzz` runs `guided.py`."""
