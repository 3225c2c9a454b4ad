"""Exchange frames between an engine's process and its worker process, over a socket.

    0                 4      5
    | body nbytes u32 | kind | body ... |          little endian, both processes run on one machine

    SETUP     engine -> worker   JSON: configuration, the engine's tensors, the agents
    ADD       engine -> worker   JSON: one more agent, after a change of the epoch
    SAVE      engine -> worker   order, agent, event, deadline; keys; slot indices per space; trace
    LOAD      engine -> worker   the same fields
    RETIRE    engine -> worker   agent: it ends its jobs and takes no more
    ASK       engine -> worker   lookup: number, deadline; namespaces and keys per group; trace
    TOUCH     engine -> worker   the same fields: mark these pages as used
    HINT      engine -> worker   JSON: a request's hints, where its pages end; then as a lookup's
    CLOSE     engine -> worker   seconds: running jobs end, then the process ends
    READY     worker -> engine   answer to SETUP: when it became ready, on the monotonic clock
    GATHERED  worker -> engine   order: its blocks have been read
    SAVED     worker -> engine   order, pages stored, existing, dropped; the reason
    LOADED    worker -> engine   order, pages in place, pages loaded; why it ended early
    ANSWER    worker -> engine   lookup, status; a byte per key and group, or the error

Every length is checked before it is used. A peer that breaks the framing is killed.

    EngineEnd    never waits: sends what the kernel accepts, keeps the rest; returns arrived frames
    AgentsEnd    waits for frames, or for the engine's end; sends from any thread
"""

import contextlib
import enum
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_agent.hints import RequestHints, Retention
from kvstore.errors import Exhausted, InvalidRequest, ProtocolError
from kvstore.keys import PREFIX_HASH_NBYTES_MAX
from kvstore.tracing import PACKED_NBYTES, REQUESTS_MAX

HEADER = struct.Struct("<IB")
# An order of 128k pages of 64-byte keys needs 9 MiB.
BODY_NBYTES_MAX = 16 << 20
TEXT_NBYTES_MAX = 4096
# Orders that the worker process has not read yet, because it is starting or stopped.
UNSENT_NBYTES_MAX = 32 << 20

_RECEIVED_NBYTES = 256 << 10
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_ORDER = struct.Struct("<QIidI")  # order, agent, event (-1: none), until, keys
_SPACE = struct.Struct("<BI")  # length of the name, indices
_NUMBER = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
_SAVED = struct.Struct("<QIII")
_LOADED = struct.Struct("<QII")
_QUESTION = struct.Struct("<QdH")  # question, until, groups
_GROUP = struct.Struct("<HI")  # namespaces, keys
_NAMESPACE = struct.Struct("<H")
_ANSWER = struct.Struct("<QIB")  # question, status, groups
_COUNT = struct.Struct("<I")
_INDEX_NBYTES = 8
# Bytes of a trace: none, or of each request
_TRACES = range(0, (REQUESTS_MAX + 1) * PACKED_NBYTES, PACKED_NBYTES)


class Kind(enum.IntEnum):
    """Enumerate the kinds of frames."""

    SETUP = 1
    ADD = 2
    SAVE = 3
    LOAD = 4
    RETIRE = 5
    CLOSE = 6
    ASK = 7
    TOUCH = 8
    HINT = 9
    READY = 17
    GATHERED = 18
    SAVED = 19
    LOADED = 20
    ANSWER = 21


@dataclass(frozen=True)
class Order:
    """A save or a load.

    `event`: number of the event after which it begins, -1 for none. `until`: its deadline on the
    monotonic clock, which the processes of a machine share. `slot_indices`: per index space int64
    indices in native byte order.
    """

    number: int
    agent: int
    event: int
    until: float
    keys: Sequence[bytes]
    slot_indices: Mapping[str, bytes]
    trace: bytes = b""  # of its requests (`kvstore.tracing.packed_now`)


@dataclass(frozen=True)
class Saved:
    """Result of a save order."""

    order: int
    stored: int
    existing: int
    dropped: int
    reason: str | None


@dataclass(frozen=True)
class Loaded:
    """Result of a load order."""

    order: int
    pages: int
    loaded: int
    error: str | None


@dataclass(frozen=True)
class Question:
    """A lookup: per group the numbers of registered namespaces, and keys."""

    number: int
    until: float
    groups: Sequence[tuple[Sequence[int], Sequence[bytes]]]
    trace: bytes = b""  # as in an order


@dataclass(frozen=True)
class AskedHint:
    """A request's hints and their pages (`gpu_agent.hint_sender.HintedPages`).

    `groups`: as in a question. `after_s`: when they are sent (`gpu_agent.hint_sender.Send`).
    """

    hints: RequestHints
    tokens: Sequence[range]
    began: float
    over: bool
    after_s: Sequence[float]
    groups: Sequence[tuple[Sequence[int], Sequence[bytes]]]


@dataclass(frozen=True)
class Answer:
    """The answer to a lookup.

    `status`: 0, or an error's by kvstore.errors. `groups`: a byte per key, 1 if it is stored.
    """

    question: int
    status: int
    error: str | None
    groups: Sequence[bytes]


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """Build a frame. Raises InvalidRequest for a body that is too large."""
    if len(body) > BODY_NBYTES_MAX:
        raise InvalidRequest(
            f"an order of {len(body)} bytes; at most {BODY_NBYTES_MAX} go to the agents' process"
        )
    return HEADER.pack(len(body), kind) + body


def header(data: bytes | bytearray) -> tuple[int, Kind]:
    """Parse a header to (body bytes, kind). Raises ProtocolError."""
    nbytes, number = HEADER.unpack_from(data)
    if nbytes > BODY_NBYTES_MAX:
        raise ProtocolError(f"a frame with a body of {nbytes} bytes, at most {BODY_NBYTES_MAX}")
    try:
        return nbytes, Kind(number)
    except ValueError as error:
        raise ProtocolError(f"a frame of unknown kind {number}") from error


def facts_frame(kind: Kind, facts: Mapping[str, Any]) -> bytes:
    """Build a frame of JSON facts."""
    return frame(kind, json.dumps(facts).encode())


def parse_facts(body: bytes) -> dict[str, Any]:
    """Parse JSON facts. Raises ProtocolError."""
    try:
        facts = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"facts that are no JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ProtocolError(f"facts that are a JSON {type(facts).__name__}, not an object")
    return facts


def order_frame(kind: Kind, order: Order) -> bytes:
    """Build the frame of an order."""
    head = _ORDER.pack(order.number, order.agent, order.event, order.until, len(order.keys))
    parts = [head, _lengths(order.keys), *order.keys, bytes((len(order.slot_indices),))]
    for name, indices in order.slot_indices.items():
        parts += (
            _SPACE.pack(len(name.encode()), len(indices) // _INDEX_NBYTES),
            name.encode(),
            indices,
        )
    parts += (bytes((len(order.trace),)), order.trace)
    return frame(kind, b"".join(parts))


def parse_order(body: bytes) -> Order:
    """Parse an order. Raises ProtocolError. The agent checks the indices."""
    reader = _Reader(body)
    number, agent, event, until, count = reader.unpack(_ORDER)
    keys = reader.keys(count)
    slot_indices = {}
    for _ in range(reader.take(1)[0]):
        name_nbytes, indices = reader.unpack(_SPACE)
        name = reader.take(name_nbytes).decode(errors="replace")
        slot_indices[name] = reader.take(indices * _INDEX_NBYTES)
    trace = reader.trace()
    reader.end()
    return Order(number, agent, event, until, keys, slot_indices, trace)


def question_frame(kind: Kind, question: Question) -> bytes:
    """Build the frame of a lookup."""
    return frame(kind, _question_body(question))


def _question_body(question: Question) -> bytes:
    parts = [_QUESTION.pack(question.number, question.until, len(question.groups))]
    for namespaces, keys in question.groups:
        parts += (
            _GROUP.pack(len(namespaces), len(keys)),
            *map(_NAMESPACE.pack, namespaces),
            _lengths(keys),
            *keys,
        )
    parts += (bytes((len(question.trace),)), question.trace)
    return b"".join(parts)


def parse_question(body: bytes) -> Question:
    """Parse a lookup. Raises ProtocolError."""
    reader = _Reader(body)
    number, until, count = reader.unpack(_QUESTION)
    groups = []
    for _ in range(count):
        namespaces, keys = reader.unpack(_GROUP)
        numbers = [reader.unpack(_NAMESPACE)[0] for _ in range(namespaces)]
        groups.append((numbers, reader.keys(keys)))
    trace = reader.trace()
    reader.end()
    return Question(number, until, groups, trace)


def hint_frame(asked: AskedHint) -> bytes:
    """Build the frame of a request's hints. Raises InvalidRequest for one that is too large."""
    tokens = [(each.start, each.stop, each.step) for each in asked.tokens]
    facts = json.dumps((asked.hints, tokens, asked.began, asked.over, list(asked.after_s))).encode()
    body = _question_body(Question(0, 0.0, asked.groups))
    return frame(Kind.HINT, _COUNT.pack(len(facts)) + facts + body)


def parse_hint(body: bytes) -> AskedHint:
    """Parse a request's hints. Raises ProtocolError."""
    reader = _Reader(body)
    facts = reader.take(reader.unpack(_COUNT)[0])
    try:
        fields, tokens, began, over, after_s = json.loads(facts)
        session, retentions, *others = fields
        hints = RequestHints(session, tuple(Retention(*each) for each in retentions), *others)
        tokens = [range(*each) for each in tokens]
        counts, began, after_s = list(map(len, tokens)), float(began), list(map(float, after_s))
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"no words: {error}") from error
    if not after_s:
        raise ProtocolError("a hint that is never sent")
    groups = parse_question(reader.rest()).groups
    if counts != [len(keys) for _, keys in groups]:
        raise ProtocolError("tokens of another number of pages")
    return AskedHint(hints, tokens, began, over, after_s, groups)


def answer_frame(answer: Answer) -> bytes:
    """Build the frame of a lookup's answer."""
    parts = [_ANSWER.pack(answer.question, answer.status, len(answer.groups))]
    for there in answer.groups:
        parts += (_COUNT.pack(len(there)), there)
    return frame(Kind.ANSWER, b"".join(parts) + _text(answer.error))


def parse_answer(body: bytes) -> Answer:
    """Parse a lookup's answer. Raises ProtocolError."""
    reader = _Reader(body)
    question, status, count = reader.unpack(_ANSWER)
    groups = [reader.take(reader.unpack(_COUNT)[0]) for _ in range(count)]
    return Answer(question, status, reader.text(), groups)


def number_frame(kind: Kind, number: int) -> bytes:
    """Build a frame with a number."""
    return frame(kind, _NUMBER.pack(number))


def parse_number(body: bytes) -> int:
    """Parse a number. Raises ProtocolError."""
    return int(_whole(_NUMBER, body)[0])


def close_frame(seconds: float) -> bytes:
    """Build the frame of a close."""
    return frame(Kind.CLOSE, _SECONDS.pack(seconds))


def parse_close(body: bytes) -> float:
    """Parse a close. Raises ProtocolError."""
    return float(_whole(_SECONDS, body)[0])


def ready_frame(at: float) -> bytes:
    """Build the frame that says that the worker is ready."""
    return frame(Kind.READY, _SECONDS.pack(at))


def parse_ready(body: bytes) -> float:
    """Parse when the worker got ready. Raises ProtocolError."""
    return float(_whole(_SECONDS, body)[0])


def saved_frame(saved: Saved) -> bytes:
    """Build the frame of a save's result."""
    head = _SAVED.pack(saved.order, saved.stored, saved.existing, saved.dropped)
    return frame(Kind.SAVED, head + _text(saved.reason))


def parse_saved(body: bytes) -> Saved:
    """Parse a save's result. Raises ProtocolError."""
    reader = _Reader(body)
    order, stored, existing, dropped = reader.unpack(_SAVED)
    return Saved(order, stored, existing, dropped, reader.text())


def loaded_frame(loaded: Loaded) -> bytes:
    """Build the frame of a load's result."""
    return frame(
        Kind.LOADED, _LOADED.pack(loaded.order, loaded.pages, loaded.loaded) + _text(loaded.error)
    )


def parse_loaded(body: bytes) -> Loaded:
    """Parse a load's result. Raises ProtocolError."""
    reader = _Reader(body)
    order, pages, loaded = reader.unpack(_LOADED)
    return Loaded(order, pages, loaded, reader.text())


def _lengths(keys: Sequence[bytes]) -> bytes:
    try:
        return bytes(map(len, keys))
    except ValueError as error:
        raise InvalidRequest(
            f"a key of {max(map(len, keys))} bytes, at most {PREFIX_HASH_NBYTES_MAX}"
        ) from error


def _text(text: str | None) -> bytes:
    return (text or "").encode()[:TEXT_NBYTES_MAX]


def _whole(form: struct.Struct, body: bytes) -> tuple[Any, ...]:
    reader = _Reader(body)
    values = reader.unpack(form)
    reader.end()
    return values


class _Reader:
    """Parse a body.

    Raises ProtocolError if it is shorter or longer than its lengths say.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        part = self._body[self._at : self._at + nbytes]
        if len(part) < nbytes:
            raise ProtocolError(
                f"a frame of {len(self._body)} bytes ends {nbytes - len(part)} bytes too early"
            )
        self._at += nbytes
        return part

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def keys(self, count: int) -> list[bytes]:
        lengths = self.take(count)
        longest = max(lengths, default=0)
        if longest > PREFIX_HASH_NBYTES_MAX:
            raise ProtocolError(f"a key of {longest} bytes, at most {PREFIX_HASH_NBYTES_MAX}")
        # the usual case of an engine with thousands of equal keys
        if longest and min(lengths) == longest:
            keys = self.take(count * longest)
            return [keys[start : start + longest] for start in range(0, len(keys), longest)]
        return [self.take(length) for length in lengths]

    def trace(self) -> bytes:
        nbytes = self.take(1)[0]
        if nbytes not in _TRACES:
            raise ProtocolError(
                f"a trace of {nbytes} bytes; each has {PACKED_NBYTES}, at most {REQUESTS_MAX}"
            )
        return self.take(nbytes)

    def rest(self) -> bytes:
        return self.take(len(self._body) - self._at)

    def text(self) -> str | None:
        """Return the rest as text; None if it is empty."""
        return self.rest().decode(errors="replace") or None

    def end(self) -> None:
        if self._at != len(self._body):
            raise ProtocolError(
                f"a frame of {len(self._body)} bytes has {len(self._body) - self._at} too many"
            )


class EngineEnd:
    """The engine's end, which never waits.

    Not thread-safe. An OSError of the socket means that the peer is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._received = bytearray()

    def put(self, data: bytes, unsent_nbytes_max: int = UNSENT_NBYTES_MAX) -> None:
        """Queue `data` for the next `flush`.

        Raises Exhausted, and drops `data`, if too much would be unsent.
        """
        if len(self._unsent) + len(data) > unsent_nbytes_max:
            raise Exhausted(f"{len(self._unsent)} bytes of orders wait for the agents' process")
        self._unsent += data

    @property
    def unsent(self) -> bool:
        """Return whether bytes wait to be sent."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Queue and flush.

        Raises as `put`.
        """
        self.put(data)
        self.flush()

    def flush(self) -> None:
        """Send as much as can be sent now."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent, _FLAGS)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def received(self) -> Iterator[tuple[Kind, bytes]]:
        """Yield the frames that have arrived.

        Raises ProtocolError, and ConnectionError after the last frame of a peer that is gone.
        """
        ended = False
        while not ended:
            try:
                data = self._sock.recv(_RECEIVED_NBYTES, _FLAGS)
            except BlockingIOError:
                break
            self._received += data
            ended = not data
        while (found := _first(self._received)) is not None:
            yield found
        if ended:
            raise ConnectionError("the agents' process has ended")

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to receive.

        By poll: an engine may have more descriptors than `select` can handle.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(1000 * timeout_s)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class AgentsEnd:
    """The worker's end.

    One thread receives, any thread sends.

    `engine`: the process id of the other end. Its death ends the channel even while another process
    holds its socket open.
    """

    def __init__(self, sock: socket.socket, engine: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        try:
            self._pidfd = os.pidfd_open(engine)
        except ProcessLookupError as error:
            raise ConnectionError("the engine's process has ended") from error
        self._poll.register(self._pidfd, select.POLLIN)

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next frame.

        Raises ProtocolError; ConnectionError when the engine is gone.
        """
        while (found := _first(self._received)) is None:
            ready = dict(self._poll.poll())
            if self._pidfd in ready:
                raise ConnectionError("the engine's process has ended")
            data = self._sock.recv(_RECEIVED_NBYTES)
            if not data:
                raise ConnectionError("the engine has hung up")
            self._received += data
        return found

    def send(self, data: bytes) -> None:
        """Send, and wait until the kernel accepts it.

        If the engine is gone, `receive` raises.
        """
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(data)


def _first(data: bytearray) -> tuple[Kind, bytes] | None:
    """Remove the first frame from `data` and return it; None if it is incomplete.

    Raises ProtocolError.
    """
    if len(data) < HEADER.size:
        return None
    nbytes, kind = header(data)
    end = HEADER.size + nbytes
    if len(data) < end:
        return None
    body = bytes(data[HEADER.size : end])
    del data[:end]
    return kind, body
