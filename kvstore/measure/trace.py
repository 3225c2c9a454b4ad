"""Traces of requests, as published by Mooncake: one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2111]}

`timestamp` is in milliseconds, lengths are in tokens. An id stands for one page *and everything
before it* (one parent per id), so ids are prefix hashes already, only shorter ones.
"""

import hashlib
import itertools
import json
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from kvstore.errors import InvalidRequest

LINE_NBYTES_MAX = 16 << 20  # a request of a million pages; more is not a trace but a mistake
SYSTEM_PROMPT_PAGES = (4, 8, 16)
CHATS = 64  # at a time
CHAT_PAGES_MAX = 48
_NUMBERS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True)
class TraceRequest:
    """One request. `hash_ids`: its pages, head first."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def trace_prefix_hash(hash_id: int) -> bytes:
    """The 32-byte prefix hash that stands for an id: SHA-256("kvstore-trace" || u64le id)."""
    return hashlib.sha256(b"kvstore-trace" + struct.pack("<Q", hash_id)).digest()


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests (None: all), read line by line.

    Raises InvalidRequest naming the file and line for anything that is not as described above.
    """
    return islice(_requests(path), limit)


def conversations(count: int, seed: int = 1) -> list[TraceRequest]:
    """`count` requests that nobody made: many chats beside each other, each request of a chat with all pages of the one
    before and some new ones, behind one of a few system prompts."""
    chance, fresh = random.Random(seed), itertools.count()
    prompts = [tuple(itertools.islice(fresh, pages)) for pages in SYSTEM_PROMPT_PAGES]
    chats = [chance.choice(prompts) for _ in range(CHATS)]
    requests = []
    for number in range(count):
        chat = chance.randrange(CHATS)
        if len(chats[chat]) > CHAT_PAGES_MAX:
            chats[chat] = chance.choice(prompts)
        chats[chat] += tuple(itertools.islice(fresh, chance.randint(1, 8)))
        requests.append(TraceRequest(number * 100.0, len(chats[chat]) * 512, 128, chats[chat]))
    return requests


def count_requests(path: Path, limit: int | None = None) -> int:
    """How many requests `read_trace` will give, without parsing them."""
    with _opened(path) as file:
        return sum(1 for _ in islice((line for _, line in _lines(path, file)), limit))


def _requests(path: Path) -> Iterator[TraceRequest]:
    with _opened(path) as file:
        for number, line in _lines(path, file):
            try:
                yield _parse(line)
            except ValueError as error:
                raise InvalidRequest(f"{path}, line {number}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    try:
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
        fields = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    missing = [name for name in (*_NUMBERS, "hash_ids") if name not in fields]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for name in _NUMBERS:
        number = fields[name]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number!r}, not a number >= 0")
    return TraceRequest(
        fields["timestamp"], int(fields["input_length"]), int(fields["output_length"]), _hash_ids(fields["hash_ids"])
    )


def _hash_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {type(ids).__name__}, not a list")
    for hash_id in ids:
        if isinstance(hash_id, bool) or not isinstance(hash_id, int) or not 0 <= hash_id < 1 << 64:
            raise ValueError(f"hash id {hash_id!r} is not an integer in 0..2^64-1")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids names an id twice, so they are not chained prefix hashes")
    return tuple(ids)
