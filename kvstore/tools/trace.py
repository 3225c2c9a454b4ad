"""Read traces of requests, write them from a node's recording, and make page content for them.

A trace is one JSON object per line, as published by Mooncake:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2111]}

`timestamp` is in milliseconds, lengths are in tokens. An id stands for one page *and everything
before it* (one parent per id), so ids are prefix hashes already, only shorter ones.

A trace with sessions has `session`, a name, and `ended` at a session's last request.

In a recording these are requests that hints were about, `stored`.

`kvstore record` adds `page_nbytes` and `page_tokens` of its pages, and `stored` where pages were
stored or used without a lookup. Its ids are numbered in order of appearance. A request may have
only the end of its chain, such as the pages that an engine stores in one step. The order of pages
is learned from all requests, and at the end each request gets the pages before its own.
"""

import hashlib
import itertools
import json
import random
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.results import Recorded

LINE_NBYTES_MAX = 16 << 20  # bytes of a request with a million pages; a longer line is a mistake
NUMBER_MAX = 1e15  # limit of any time, length or size; sums and products stay finite
SYSTEM_PROMPT_PAGES = (4, 8, 16)
CHATS = 64
CHAT_PAGES_MAX = 48
_NUMBERS = ("timestamp", "input_length", "output_length")
_PAGE_NUMBERS = ("page_nbytes", "page_tokens")

SESSION_LENGTH_MAX = 64
LINE_NBYTES = 120  # bytes of a recorded request, without its pages
_UNKNOWN = -1  # no page is known to precede this one


class TraceRequest(NamedTuple):
    """One request of a trace.

    `hash_ids`: its pages, head first. `page_nbytes`, `page_tokens`: 0 if the trace does not say.
    `session`: its name, empty if the trace does not say; `ended`: this was its last request.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    page_nbytes: int = 0
    page_tokens: float = 0.0
    stored: bool = False
    session: str = ""
    ended: bool = False


def trace_prefix_hash(hash_id: int) -> bytes:
    """Return the prefix hash of a trace's id: SHA-256("kvstore-trace" || u64le id)."""
    return hashlib.sha256(b"kvstore-trace" + struct.pack("<Q", hash_id)).digest()


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the first `limit` requests (None: all), read line by line.

    Raises InvalidRequest with file and line for anything else than the format above.
    """
    return islice(_requests(path), limit)


def conversations(count: int, seed: int = 1) -> list[TraceRequest]:
    """Return generated requests as a list; see `chatting`."""
    return list(chatting(count, seed))


def chatting(count: int, seed: int = 1, at_a_time: int = CHATS) -> Iterator[TraceRequest]:
    """Yield generated requests of many concurrent chats.

    Each request has all pages of the chat's previous one and some new ones, behind one of a few
    system prompts.
    """
    chance, fresh = random.Random(seed), itertools.count()
    prompts = [tuple(itertools.islice(fresh, pages)) for pages in SYSTEM_PROMPT_PAGES]
    chats = [chance.choice(prompts) for _ in range(at_a_time)]
    for number in range(count):
        chat = chance.randrange(at_a_time)
        if len(chats[chat]) > CHAT_PAGES_MAX:
            chats[chat] = chance.choice(prompts)
        chats[chat] += tuple(itertools.islice(fresh, chance.randint(1, 8)))
        yield TraceRequest(number * 100.0, len(chats[chat]) * 512, 128, chats[chat])


def count_requests(path: Path, limit: int | None = None) -> int:
    """Count the requests that `read_trace` will yield, without parsing them."""
    return trace_size(path, limit)[0]


def trace_size(path: Path, limit: int | None = None) -> tuple[int, int]:
    """Return (requests, approximate pages) of a trace without parsing it."""
    requests = pages = 0
    with _opened(path) as file:
        for _, line in islice(_lines(path, file), limit):
            requests += 1
            pages += line.count(b",") - 2
    return requests, max(0, pages)


def _requests(path: Path) -> Iterator[TraceRequest]:
    with _opened(path) as file:
        for number, line in _lines(path, file):
            try:
                yield _parse(line)
            except ValueError as error:
                raise InvalidRequest(f"{path}, line {number}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise InvalidRequest(
                f"{path} is a pipe, and a trace is read several times: write it to a file first"
            )
        return path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"can not read trace {path}: {error.strerror}") from error


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of each line that is not blank."""
    number = 0
    try:
        while line := file.readline(LINE_NBYTES_MAX + 1):
            number += 1
            if len(line) > LINE_NBYTES_MAX:
                raise InvalidRequest(f"{path}, line {number}: longer than {LINE_NBYTES_MAX} bytes")
            if line.strip():
                yield number, line
    except OSError as error:
        raise InvalidRequest(
            f"can not read trace {path} after line {number}: {error.strerror}"
        ) from error


def _parse(line: bytes) -> TraceRequest:
    """Parse a line. Raises ValueError saying what is wrong with it."""
    try:
        # decoded first: bytes would make `loads` guess the encoding
        fields = json.loads(line.decode())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    missing = [name for name in (*_NUMBERS, "hash_ids") if name not in fields]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    timestamp, input_length, output_length = [_number(name, fields[name]) for name in _NUMBERS]
    request = TraceRequest(
        timestamp, int(input_length), int(output_length), _hash_ids(fields["hash_ids"])
    )
    if len(fields) == len(_NUMBERS) + 1:
        return request
    page_nbytes, page_tokens = [_number(name, fields.get(name, 0)) for name in _PAGE_NUMBERS]
    for name in ("stored", "ended"):
        if not isinstance(fields.get(name, False), bool):
            raise ValueError(f"{name} is {fields[name]!r}, not true or false")
    session = fields.get("session", "")
    if not isinstance(session, str) or len(session) > SESSION_LENGTH_MAX:
        raise ValueError(f"session is {session!r:.80}, not a short string")
    return request._replace(
        page_nbytes=int(page_nbytes),
        page_tokens=page_tokens,
        stored=fields.get("stored", False),
        session=session,
        ended=fields.get("ended", False),
    )


def _number(name: str, number: Any) -> float:
    # a bool is not a number here
    if type(number) not in (int, float) or not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"{name} is {number!r}, not a number >= 0 and up to {NUMBER_MAX:g}")
    return number  # type: ignore[no-any-return]


def _hash_ids(ids: object) -> tuple[int, ...]:
    """Check the hash ids as a whole: there may be millions."""
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {type(ids).__name__}, not a list")
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 1 << 64):
        wrong = next(some for some in ids if type(some) is not int or not 0 <= some < 1 << 64)
        raise ValueError(f"hash id {wrong!r} is not an integer in 0..2^64-1")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids names an id twice, so they are not chained prefix hashes")
    return tuple(ids)


def page_content(namespace_digest: bytes, prefix_hash: bytes, nbytes: int) -> bytes:
    """Return the bytes that tools store under this key, so that a reader can verify every one.

        content = SHAKE-128(namespace digest || prefix hash), as many bytes as the page has

    Every byte depends on the key and on its position: a page under the wrong key and a shifted, cut
    or swapped part of a page all differ. SHAKE-128 because every language has it, and because it
    makes 0.6 GB/s here, twice Mersenne Twister's `randbytes`.
    """
    return hashlib.shake_128(namespace_digest + prefix_hash).digest(nbytes)


class Chains:
    """Numbers of pages, and the predecessor of each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._before = array("q")
        # Number of pages before each, as far as known at its first appearance
        self._deep = array("q")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, ids: Iterable[int]) -> list[int]:
        """Number the pages of a chain; a repeated page counts once."""
        numbers = [
            self._numbers.setdefault(page, len(self._numbers)) for page in dict.fromkeys(ids)
        ]
        self._before.extend([_UNKNOWN] * (len(self._numbers) - len(self._before)))
        self._deep.extend([0] * (len(self._numbers) - len(self._deep)))
        for before, number in itertools.pairwise(numbers):
            if self._before[number] == _UNKNOWN:
                self._before[number] = before
                self._deep[number] = self._deep[before] + 1
        return numbers

    def deep(self, number: int) -> int:
        """Return about how many pages `whole` finds before this one."""
        return self._deep[number]

    def whole(self, numbers: Sequence[int]) -> list[int]:
        """Extend a chain by the pages that are known to precede it."""
        seen, head = set(numbers), []
        number = self._before[numbers[0]]
        # Keys that are no chains may form a circle
        while number != _UNKNOWN and number not in seen:
            head.append(number)
            seen.add(number)
            number = self._before[number]
        return [*reversed(head), *numbers]


class Recording:
    """A recording, kept in the file `spool` until `lines` is called.

    `nbytes`: about the bytes of all lines. `dropped`: requests that exceeded the node's memory for
    recordings.
    """

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self.chains = Chains()
        self.requests = 0
        self.stores = 0
        self.nbytes = 0
        self.dropped = 0

    def add(self, reply: Recorded) -> None:
        """Add a reply of the node to the recording."""
        self.dropped = reply.dropped
        for use in reply.uses:
            if not use.pages:
                continue
            pages = self.chains.add(use.pages)
            fields: dict[str, Any] = {"timestamp": use.at_ms, "hash_ids": pages}
            fields |= {"page_nbytes": use.page_nbytes, "page_tokens": use.page_tokens}
            if use.stored:
                fields["stored"] = True
            if use.session:
                fields |= {"session": f"{use.session:x}", "ended": use.ended}
            self.stores += use.stored
            self.requests += not use.stored
            self._spool.write(json.dumps(fields).encode() + b"\n")
            self.nbytes += LINE_NBYTES + (len(pages) + self.chains.deep(pages[0])) * len(
                f"{pages[-1]}, "
            )

    def lines(self) -> Iterator[str]:
        """Yield the lines of the trace."""
        self._spool.seek(0)
        for line in self._spool:
            fields = json.loads(line)
            pages = self.chains.whole(fields.pop("hash_ids"))
            length = round(len(pages) * fields["page_tokens"])
            start = {
                "timestamp": fields.pop("timestamp"),
                "input_length": length,
                "output_length": 0,
            }
            yield json.dumps({**start, "hash_ids": pages, **fields}) + "\n"
