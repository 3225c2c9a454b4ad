"""Random mutations of seed inputs, without coverage guidance, for the short run of `make test`."""

import random
from collections.abc import Callable, Iterator, Sequence

# Numbers at the limits of integer types, as bytes
EDGES = [
    number.to_bytes(nbytes, order)
    for nbytes in (1, 2, 4, 8)
    for number in (0, 1, (1 << 8 * nbytes - 1) - 1, 1 << 8 * nbytes - 1, (1 << 8 * nbytes) - 1)
    for order in ("little", "big")
]
WORDS = [
    *(b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"1e308t", b"null", b"[]", b"{}", b"[" * 2000),
    *(
        b"\xff" * 10,
        b"\x80" * 9 + b"\x01",
        b"\0" * 16,
        "²٣\ud800".encode("utf-8", "surrogatepass"),
        b"\\ud800",
    ),
]


def inputs(chance: random.Random, seeds: Sequence[bytes], nbytes_max: int) -> Iterator[bytes]:
    """Yield the seeds, then mutations of one or two of them without end."""
    yield from seeds
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(1 << chance.randrange(5)):
            chance.choice(_WAYS)(chance, data, seeds)
        yield bytes(data[:nbytes_max])


def _flip(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _edge(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    edge = chance.choice(EDGES)
    at = chance.randrange(len(data) + 1)
    data[at : at + len(edge)] = edge


def _word(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at : at + chance.randrange(8)] = chance.choice(WORDS)


def _cut(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.randrange(1, 32)]


def _twice(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.randrange(1, 64)]


def _other(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = chance.choice(seeds)
    at = chance.randrange(len(other) + 1)
    data[chance.randrange(len(data) + 1) :] = other[at:]


_WAYS: list[Callable[[random.Random, bytearray, Sequence[bytes]], None]] = [
    *(_flip, _byte, _edge, _word, _cut, _twice, _other)
]
