"""Fuzzing of every parser of bytes from outside; `guided.py` is what `make fuzz` runs."""
