"""What happened on disk, in numbers."""

from dataclasses import dataclass


@dataclass
class DiskCounters:
    """What happened since the start; pages unless the name says otherwise."""

    pages_written: int = 0
    pages_read: int = 0
    pages_read_in_part: int = 0  # for ranges of them; their bytes are in nbytes_read, too
    pages_evicted: int = 0
    pages_corrupt: int = 0
    pages_refused: int = 0  # stayed in RAM only: the queue was full, the tier poisoned or full of pins
    pages_scrubbed: int = 0
    rows_damaged: int = 0
    nbytes_written: int = 0
    nbytes_read: int = 0
