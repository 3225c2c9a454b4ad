"""Recordings of a node's requests: bounded, one at a time, free when off, and without keys."""

import hashlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect

from kvstore import Exhausted, InvalidRequest, Namespace, opaque_layout
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node
from node.serving import recorder as module
from node.serving.recorder import Recorder

SPACE = Namespace("recorded", opaque_layout(300, page_tokens=64), tp_rank=1, tp_size=4)
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(6)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    index: Any = SimpleNamespace(value=SPACE, page_nbytes=SPACE.stored_nbytes)
    return Recorder({SPACE.digest: index}.__getitem__, clock)


def begin(recorder: Recorder, ms: int = 10_000) -> bytes:
    return recorder.record(pb.RecordRequest(ms=ms), None).recording


def fetch(recorder: Recorder, name: bytes, end: bool = False) -> pb.RecordReply:
    return recorder.record(pb.RecordRequest(recording=name, end=end), None)


def test_recorder_is_off_outside_a_recording(recorder: Recorder, clock: Clock) -> None:
    assert not recorder.on
    name = begin(recorder)
    assert recorder.on
    clock.now += 0.25
    recorder.note(SPACE.digest, KEYS[:3], stored=False)
    recorder.note(SPACE.digest, KEYS[1:4], stored=True)
    reply = fetch(recorder, name)
    asked, stored = reply.uses
    assert (asked.at_ms, asked.stored, asked.page_nbytes, asked.page_tokens) == (
        250,
        False,
        300,
        16.0,
    )
    assert list(asked.pages[1:]) == list(stored.pages[:2]), "the same pages must have the same ids"
    assert stored.stored
    assert not reply.more
    assert not reply.over
    assert fetch(recorder, name, end=True).over
    assert not recorder.on


def test_hint_that_names_a_session_is_recorded_by_an_id(recorder: Recorder) -> None:
    name = begin(recorder)
    recorder.note(SPACE.digest, KEYS[:2], stored=True, session=b"secret")
    recorder.note(SPACE.digest, KEYS[:3], stored=True, session=b"secret", ended=True)
    reply = fetch(recorder, name, end=True)
    first, last = reply.uses
    assert first.session == last.session != 0
    assert (first.ended, last.ended) == (False, True)
    assert b"secret" not in reply.SerializeToString()


def test_ids_reveal_no_keys_and_differ_between_recordings(recorder: Recorder) -> None:
    seen = []
    for _ in range(2):
        name = begin(recorder)
        recorder.note(SPACE.digest, KEYS, stored=False)
        reply = fetch(recorder, name, end=True)
        seen.append(list(reply.uses[0].pages))
        encoded = reply.SerializeToString()
        assert SPACE.digest not in encoded
        assert not any(
            key[start : start + 8] in encoded for key in KEYS for start in (0, 8, 16, 24)
        )
    assert len({*seen[0], *seen[1]}) == 2 * len(KEYS)


def test_recorder_ends_after_its_duration(recorder: Recorder, clock: Clock) -> None:
    name = begin(recorder, ms=1000)
    recorder.note(SPACE.digest, KEYS[:1], stored=False)
    clock.now += 1.5
    recorder.note(SPACE.digest, KEYS[:2], stored=False)
    reply = fetch(recorder, name)
    assert ([len(use.pages) for use in reply.uses], reply.over) == ([1], True)
    with pytest.raises(InvalidRequest, match="has ended"):
        fetch(recorder, name)


def test_second_recording_is_refused_until_the_first_is_abandoned(
    recorder: Recorder, clock: Clock
) -> None:
    first = begin(recorder, ms=10**6)
    with pytest.raises(Exhausted, match="only one recording at a time"):
        begin(recorder)
    clock.now += module.ABANDONED_S + 1
    recorder.note(SPACE.digest, KEYS, stored=False)
    assert not recorder.on
    second = begin(recorder)
    assert recorder.on
    with pytest.raises(InvalidRequest, match="has ended"):
        fetch(recorder, first)
    assert fetch(recorder, second, end=True).over


def test_recorder_client_away_too_long_gets_an_error(recorder: Recorder, clock: Clock) -> None:
    name = begin(recorder, ms=10**6)
    recorder.note(SPACE.digest, KEYS, stored=False)
    clock.now += module.ABANDONED_S + 1
    recorder.note(SPACE.digest, KEYS, stored=False)
    with pytest.raises(InvalidRequest, match="not fetched for a minute"):
        fetch(recorder, name)
    name = begin(recorder, ms=10**6)
    clock.now += module.ABANDONED_S + 1
    with pytest.raises(InvalidRequest, match="not fetched for a minute"):
        fetch(recorder, name)
    assert not recorder.on


@pytest.mark.parametrize("ms", [1000, 10**6])
def test_abandoned_recording_is_freed(recorder: Recorder, clock: Clock, ms: int) -> None:
    """Its secret and up to 50 MiB of waiting uses are freed, also if its duration had passed
    before.
    """
    begin(recorder, ms)
    gone = weakref.ref(kept := Kept(KEYS))
    recorder.note(SPACE.digest, kept, stored=False)
    del kept
    clock.now += 2
    recorder.note(SPACE.digest, KEYS, stored=False)
    assert gone() is not None
    clock.now += module.ABANDONED_S
    recorder.note(SPACE.digest, KEYS, stored=False)
    assert (gone(), recorder.on) == (None, False)


class Kept(list[bytes]):
    """A list that weak references can refer to."""


def test_requests_after_the_end_are_not_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a busy node would never deliver the last reply."""
    monkeypatch.setattr(module, "REPLY_PAGES_MAX", 6 + module.USE_PAGES)
    name = begin(recorder)
    for _ in range(2):
        recorder.note(SPACE.digest, KEYS, stored=False)
    assert fetch(recorder, name, end=True).more
    monkeypatch.setattr(recorder, "_clock_s", lambda: Clock.now + 0.001)
    recorder.note(SPACE.digest, KEYS, stored=False)
    assert fetch(recorder, name, end=True).over


@pytest.mark.parametrize("ms", [0, module.RECORD_MS_MAX + 1])
def test_recording_of_invalid_duration_is_refused(recorder: Recorder, ms: int) -> None:
    with pytest.raises(InvalidRequest, match="ms"):
        begin(recorder, ms)
    assert not recorder.on


def test_recorder_queue_is_bounded_and_counts_drops(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_PAGES_MAX", 4 * (6 + module.USE_PAGES))
    monkeypatch.setattr(module, "REPLY_PAGES_MAX", 2 * (6 + module.USE_PAGES))
    name = begin(recorder)
    for _ in range(7):
        recorder.note(SPACE.digest, KEYS, stored=False)
    first, second = fetch(recorder, name), fetch(recorder, name, end=True)
    assert [len(first.uses), len(second.uses)] == [2, 2]
    assert (first.more, first.over, second.more, second.over) == (True, False, False, True)
    assert first.dropped == second.dropped == 3


def test_recorder_fetch_frees_space_and_the_end_delivers_the_rest(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_PAGES_MAX", 2 * (6 + module.USE_PAGES))
    monkeypatch.setattr(module, "REPLY_PAGES_MAX", 6 + module.USE_PAGES)
    name = begin(recorder)
    for _ in range(5):
        recorder.note(SPACE.digest, KEYS, stored=False)
        recorder.note(SPACE.digest, KEYS, stored=False)
        first, second = fetch(recorder, name, end=True), fetch(recorder, name)
        assert [len(first.uses), len(second.uses)] == [1, 1]
        assert (first.more, first.over, second.more, second.dropped) == (True, False, False, 0)
    assert fetch(recorder, name, end=True).over


def test_recording_continues_while_it_is_fetched(recorder: Recorder, clock: Clock) -> None:
    name = begin(recorder, ms=10**7)
    for _ in range(3):
        clock.now += 0.6 * module.ABANDONED_S
        recorder.note(SPACE.digest, KEYS[:1], stored=False)
        assert len(fetch(recorder, name).uses) == 1


def test_ids_differ_by_namespace_and_tokens_are_per_rank(
    clock: Clock,
) -> None:
    spaces = [
        SPACE,
        Namespace("other", opaque_layout(300, page_tokens=64), tp_size=2, pp_size=2, cp_size=4),
    ]
    found: Any = {space.digest: SimpleNamespace(value=space, page_nbytes=300) for space in spaces}
    recorder = Recorder(found.__getitem__, clock)
    name = begin(recorder)
    for space in spaces:
        recorder.note(space.digest, KEYS, stored=False)
    one, other = fetch(recorder, name).uses
    assert not set(one.pages) & set(other.pages)
    assert [one.page_tokens, other.page_tokens] == [16.0, 4.0]


def test_largest_reply_fits_a_message(recorder: Recorder) -> None:
    name = begin(recorder)
    while not recorder._recording or recorder._recording.pages < module.REPLY_PAGES_MAX:
        recorder.note(SPACE.digest, KEYS[:1], stored=True)
    assert fetch(recorder, name).ByteSize() < 2 << 20


def test_pages_of_a_removed_namespace_are_left_out(
    node: Node, connect: Connect, pages: Pages
) -> None:
    client, other = connect(node), Pages("other")
    name = client.record(60.0).recording
    for some in (pages, other):
        some.put(client, some.keys(0, 1))
        client.lookup(some.namespace, some.keys(0, 1, 2))
    client.remove_namespace(other.namespace)
    reply = client.record(recording=name, end=True)
    assert [(use.stored, len(use.pages)) for use in reply.uses][:2] == [(True, 2), (False, 3)]
    assert list(reply.uses[0].pages) == list(reply.uses[1].pages[:2])
    assert reply.over
    assert not node.service.recorder.on


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_lookups_and_puts_of_every_wire_are_recorded(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client, admin = connect(node, wire), connect(node)
    name = admin.record(60.0).recording
    pages.put(client, pages.keys(0, 1, 2))
    client.lookup(pages.namespace, pages.keys(0, 1))
    client.lookup(pages.namespace, pages.keys(0, 1, 2), touch=True)
    found = [(use.stored, len(use.pages)) for use in admin.record(recording=name, end=True).uses]
    assert found == [(True, 3), (False, 2), (True, 3)]
