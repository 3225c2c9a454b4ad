"""Fuzzing of every parser of bytes from outside; `guided.py` is what `make fuzz` runs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # modules of this folder are found by its tests
