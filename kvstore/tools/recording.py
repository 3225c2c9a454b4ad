"""What a node recorded, as a trace (`kvstore.tools.trace`).

Ids are numbered in the order in which they come. A request may have only the end of its chain: the pages that an engine
stores in one step, say. Which page stands before which is learned from all requests, and in the end each gets the pages
before its own.
"""

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from kvstore.pb import kvstore_pb2 as pb

LINE_NBYTES = 120  # without its pages
_UNKNOWN = -1


class Chains:
    """Numbers of pages, and which is before each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._before = array("q")
        self._deep = array("q")  # pages before each, as far as they were known when it was first there

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, ids: Iterable[int]) -> list[int]:
        """Numbers of pages that follow each other; one that is there twice counts once."""
        numbers = [self._numbers.setdefault(page, len(self._numbers)) for page in dict.fromkeys(ids)]
        self._before.extend([_UNKNOWN] * (len(self._numbers) - len(self._before)))
        self._deep.extend([0] * (len(self._numbers) - len(self._deep)))
        for before, number in itertools.pairwise(numbers):
            if self._before[number] == _UNKNOWN:
                self._before[number] = before
                self._deep[number] = self._deep[before] + 1
        return numbers

    def deep(self, number: int) -> int:
        """About how many pages `whole` finds before it."""
        return self._deep[number]

    def whole(self, numbers: Sequence[int]) -> list[int]:
        """With what is known to be before the first of them."""
        seen, head = set(numbers), []
        number = self._before[numbers[0]]
        while number != _UNKNOWN and number not in seen:  # keys that are no chains may go in a circle
            head.append(number)
            seen.add(number)
            number = self._before[number]
        return [*reversed(head), *numbers]


class Recording:
    """Kept in `spool`, which can be read again, until it is told with `lines`. `nbytes`: about what these come to.
    `dropped`: requests that found no room at the node."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self.chains = Chains()
        self.requests = 0
        self.stores = 0
        self.nbytes = 0
        self.dropped = 0

    def add(self, reply: pb.RecordReply) -> None:
        self.dropped = reply.dropped
        for use in reply.uses:
            if not use.pages:
                continue
            pages = self.chains.add(use.pages)
            fields: dict[str, Any] = {"timestamp": use.at_ms, "hash_ids": pages}
            fields |= {"page_nbytes": use.page_nbytes, "page_tokens": use.page_tokens}
            if use.stored:
                fields["stored"] = True
            self.stores += use.stored
            self.requests += not use.stored
            self._spool.write(json.dumps(fields).encode() + b"\n")
            self.nbytes += LINE_NBYTES + (len(pages) + self.chains.deep(pages[0])) * len(f"{pages[-1]}, ")

    def lines(self) -> Iterator[str]:
        """Of the trace."""
        self._spool.seek(0)
        for line in self._spool:
            fields = json.loads(line)
            pages = self.chains.whole(fields.pop("hash_ids"))
            length = round(len(pages) * fields["page_tokens"])
            start = {"timestamp": fields.pop("timestamp"), "input_length": length, "output_length": 0}
            yield json.dumps({**start, "hash_ids": pages, **fields}) + "\n"
