"""Traces of requests, as published by Mooncake: one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2111]}

`timestamp` is in milliseconds, lengths are in tokens. An id stands for one page *and everything
before it* (one parent per id), so ids are prefix hashes already, only shorter ones.

What `kvstore record` writes has more: `page_nbytes` and `page_tokens` of each of its pages, and `stored` where pages
were stored or used by somebody who did not ask for them first.
"""

import hashlib
import itertools
import json
import random
import stat
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvstore.errors import InvalidRequest

# Page content that follows from the page's key, so that a reader can verify every byte.
#
#     content = SHAKE-128(namespace digest || prefix hash), as many bytes as the page has
#
# Every byte depends on the key and on its position: a page under the wrong key, a shifted, cut or
# swapped piece of a page all differ. SHAKE-128 because every language has it and because here it
# makes 0.6 GB/s, twice what Mersenne Twister's `randbytes` does.


def page_content(namespace_digest: bytes, prefix_hash: bytes, nbytes: int) -> bytes:
    """The `nbytes` bytes that tools store under this key."""
    return hashlib.shake_128(namespace_digest + prefix_hash).digest(nbytes)


LINE_NBYTES_MAX = 16 << 20  # a request of a million pages; more is not a trace but a mistake
NUMBER_MAX = 1e15  # no time, length or size is larger; sums and products of such stay finite
SYSTEM_PROMPT_PAGES = (4, 8, 16)
CHATS = 64
CHAT_PAGES_MAX = 48
_NUMBERS = ("timestamp", "input_length", "output_length")
_PAGE_NUMBERS = ("page_nbytes", "page_tokens")


class TraceRequest(NamedTuple):
    """One request. `hash_ids`: its pages, head first. `page_nbytes`, `page_tokens`: 0 where the trace does not say."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    page_nbytes: int = 0
    page_tokens: float = 0.0
    stored: bool = False


def trace_prefix_hash(hash_id: int) -> bytes:
    """The 32-byte prefix hash that stands for an id: SHA-256("kvstore-trace" || u64le id)."""
    return hashlib.sha256(b"kvstore-trace" + struct.pack("<Q", hash_id)).digest()


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests (None: all), read line by line.

    Raises InvalidRequest naming the file and line for anything that is not as described above.
    """
    return islice(_requests(path), limit)


def conversations(count: int, seed: int = 1) -> list[TraceRequest]:
    """As many, a few at a time."""
    return list(chatting(count, seed))


def chatting(count: int, seed: int = 1, at_a_time: int = CHATS) -> Iterator[TraceRequest]:
    """`count` requests that nobody made: many chats beside each other, each request of a chat with all pages of the one
    before and some new ones, behind one of a few system prompts."""
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
    """How many requests `read_trace` will give, without parsing them."""
    return trace_size(path, limit)[0]


def trace_size(path: Path, limit: int | None = None) -> tuple[int, int]:
    """(requests, about as many pages) that `read_trace` will give, without parsing them."""
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
            raise InvalidRequest(f"{path} is a pipe, and a trace is read several times: write it to a file first")
        return path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"can not read trace {path}: {error.strerror}") from error


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of each line that is not blank."""
    number = 0
    try:
        while line := file.readline(LINE_NBYTES_MAX + 1):
            number += 1
            if len(line) > LINE_NBYTES_MAX:
                raise InvalidRequest(f"{path}, line {number}: longer than {LINE_NBYTES_MAX} bytes")
            if line.strip():
                yield number, line
    except OSError as error:
        raise InvalidRequest(f"can not read trace {path} after line {number}: {error.strerror}") from error


def _parse(line: bytes) -> TraceRequest:
    """Raises ValueError saying what is wrong with the line."""
    try:
        fields = json.loads(line.decode())  # text: whose encoding nobody has to guess
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    missing = [name for name in (*_NUMBERS, "hash_ids") if name not in fields]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    timestamp, input_length, output_length = [_number(name, fields[name]) for name in _NUMBERS]
    request = TraceRequest(timestamp, int(input_length), int(output_length), _hash_ids(fields["hash_ids"]))
    if len(fields) == len(_NUMBERS) + 1:
        return request
    page_nbytes, page_tokens = [_number(name, fields.get(name, 0)) for name in _PAGE_NUMBERS]
    stored = fields.get("stored", False)
    if not isinstance(stored, bool):
        raise ValueError(f"stored is {stored!r}, not true or false")
    return request._replace(page_nbytes=int(page_nbytes), page_tokens=page_tokens, stored=stored)


def _number(name: str, number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number <= NUMBER_MAX:  # a bool is no number
        raise ValueError(f"{name} is {number!r}, not a number >= 0 and up to {NUMBER_MAX:g}")
    return number  # type: ignore[no-any-return]


def _hash_ids(ids: object) -> tuple[int, ...]:
    """Checked as a whole: there may be millions."""
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {type(ids).__name__}, not a list")
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 1 << 64):
        wrong = next(some for some in ids if type(some) is not int or not 0 <= some < 1 << 64)
        raise ValueError(f"hash id {wrong!r} is not an integer in 0..2^64-1")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids names an id twice, so they are not chained prefix hashes")
    return tuple(ids)
