"""Background lookups: polls never block, deadlines hold, and each request makes one lookup."""

import concurrent.futures
import contextlib
import threading
import time
from typing import Any

import pytest

from gpu_agent.blocks.lookups import OUTAGE_WAIT_S, Lookups, ThreadLookups
from kvstore import Client, ClientConfig, LookupResult, Namespace
from kvstore.errors import Unavailable
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named

KEYS = [bytes([i]) * 32 for i in range(4)]


def namespace(name: str, epoch: int = 0) -> Namespace:
    return Namespace(name, opaque_layout(4096), epoch=epoch)


class FakeClient:
    """Answer lookups from a table; `gate` blocks them."""

    def __init__(self, stored: dict[str, set[bytes]]) -> None:
        self.stored = stored
        self.gate = threading.Event()
        self.gate.set()
        self.touch_gate = threading.Event()
        self.touch_gate.set()
        self.calls: list[tuple[str, bool]] = []
        self.error: Exception | None = None

    def lookup(
        self, namespace: Namespace, keys: Any, touch: bool = False, timeout_s: float = 0
    ) -> LookupResult:
        self.calls.append((namespace.model, touch))
        assert timeout_s > 0
        (self.touch_gate if touch else self.gate).wait(60)
        if self.error:
            raise self.error
        return LookupResult(0, tuple(key in self.stored[namespace.model] for key in keys))

    def open(self, namespace: Namespace, timeout_s: float) -> None:
        if self.error:
            raise self.error

    def close(self) -> None:
        pass


def answered(lookups: Lookups, request_id: str) -> Any:
    end = time.monotonic() + 60
    while (answer := lookups.answer(request_id)) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return answer


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient({"a": set(KEYS[:3]), "b": set(KEYS[1:])})


def test_block_hits_only_if_every_shard_has_it(fake: FakeClient) -> None:
    """R4: the shard of a single rank is no hit."""
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    lookups.ask("r", [([namespace("a"), namespace("b")], KEYS), ([namespace("a")], KEYS[:2])])
    assert answered(lookups, "r") == (b"\0\1\1\0", b"\1\1")
    assert lookups.check() == []
    lookups.close()


def test_polls_do_not_block_or_repeat_the_lookup(fake: FakeClient) -> None:
    fake.gate.clear()
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    lookups.ask("r", [([namespace("a")], KEYS)])
    assert [lookups.answer("r") for _ in range(100)] == [None] * 100
    time.sleep(0.02)
    assert lookups.age_s("r") == 0.0  # the age of an answer, not of a lookup
    fake.gate.set()
    assert answered(lookups, "r") == (b"\1\1\1\0",)
    assert all(lookups.answer("r") for _ in range(100))
    assert fake.calls == [("a", False)]
    assert (lookups.age_s("r") or 0.0) > 0.0
    assert lookups.take_counts().lookups == 1
    lookups.drop("r")
    assert lookups.answer("r") == ()
    assert lookups.age_s("r") is None
    lookups.close()


def test_old_answer_is_kept_until_a_new_one_comes(fake: FakeClient) -> None:
    """Without an answer an engine would let others overtake a request that waits for blocks."""
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    lookups.ask("r", [([namespace("a")], KEYS)])
    old = answered(lookups, "r")
    fake.gate.clear()
    lookups.ask("r", [([namespace("b")], KEYS)], old)
    assert [lookups.answer("r") for _ in range(100)] == [old] * 100
    assert lookups.age_s("r") == 0.0
    fake.gate.set()
    end = time.monotonic() + 60.0
    while lookups.answer("r") == old:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert lookups.answer("r") == (b"\0\1\1\1",)
    lookups.close()


def test_r7_lookup_past_its_deadline_is_a_miss(fake: FakeClient) -> None:
    """R7: a hung store costs one request its deadline, and later requests almost nothing."""
    fake.gate.clear()
    lookups = Lookups(ThreadLookups(fake), 2.0)  # type: ignore[arg-type]
    began = time.monotonic()
    lookups.ask("r", [([namespace("a")], KEYS)])
    assert answered(lookups, "r") == (bytes(4),)
    assert time.monotonic() - began >= 2.0
    fake.error = Unavailable("hung")
    fake.gate.set()
    lookups.touch("a request", [([namespace("a")], KEYS)])  # fails, so that the outage is known
    end = time.monotonic() + 60
    while not lookups._outage.error:
        assert time.monotonic() < end
        time.sleep(0.001)
    fake.gate.clear()
    lookups._timeout_s = 120.0  # much more than a busy machine is late
    began = time.monotonic()
    lookups.ask("s", [([namespace("a")], KEYS)])
    assert answered(lookups, "s") == (bytes(4),)
    assert OUTAGE_WAIT_S <= time.monotonic() - began < 60.0
    fake.gate.set()
    lookups.close()


def test_lookup_does_not_wait_for_touches_of_ended_requests(fake: FakeClient) -> None:
    """Requests of a batch end together, and each of their chains is touched."""
    fake.touch_gate.clear()
    lookups = Lookups(ThreadLookups(fake), 9.0)  # type: ignore[arg-type]
    for _ in range(20):
        lookups.touch("a request", [([namespace("a")], KEYS)])
    lookups.ask("r", [([namespace("a")], KEYS)])
    assert answered(lookups, "r") == (b"\1\1\1\0",)
    fake.touch_gate.set()
    lookups.close()


def test_lookups_queued_past_their_deadline_are_no_outage(
    fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Their deadlines passed before the store was asked, so later requests still wait for it."""
    fake.gate.clear()
    lookups = Lookups(ThreadLookups(fake), 0.2)  # type: ignore[arg-type]
    for number in range(10):
        lookups.ask(f"r{number}", [([namespace("a")], KEYS)])
    assert answered(lookups, "r9") == (bytes(4),)
    fake.gate.set()
    end = time.monotonic() + 60
    while lookups._running:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert "the store failed" not in caplog.text
    assert lookups.take_counts().lookups_failed == 6
    lookups.close()


def test_outage_is_a_miss_and_is_logged_once(
    fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    fake.error = Unavailable("gone")
    for number in range(5):
        lookups.ask(f"r{number}", [([namespace("a")], KEYS)])
        assert answered(lookups, f"r{number}") == (bytes(4),)
    fake.error = None
    end = time.monotonic() + 60
    # May miss: until the first answer, requests wait only OUTAGE_WAIT_S.
    while lookups._outage.error:
        assert time.monotonic() < end
        lookups.ask("s", [([namespace("a")], KEYS)])
        answered(lookups, "s")
    lookups.ask("t", [([namespace("a")], KEYS)])
    assert answered(lookups, "t")[0][0]
    lookups.close()
    assert [record.message.split(" [")[0].split(",")[0] for record in caplog.records] == [
        "the store failed",
        "the store answers again",
    ]
    assert lookups.take_counts().lookups_failed == 5


def test_outage_names_the_request_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """A lookup process may report the outage only during the lookup of the next request."""
    first: concurrent.futures.Future[Any] = concurrent.futures.Future()
    questions = [first, concurrent.futures.Future[Any]()]

    class Late(ThreadLookups):
        def __init__(self) -> None: ...

        def look_up(self, question: Any, timeout_s: float) -> Any:
            if question is not asked:
                first.set_exception(Unavailable("nobody is there"))
            return questions.pop(0)

    lookups, asked = Lookups(Late(), 10.0), [([namespace("a")], KEYS)]
    lookups.ask("one", asked)
    lookups.ask("two", [([namespace("b")], KEYS)])
    assert f"nobody is there [request {named('one').request_id}]" in caplog.text


def test_internal_error_in_a_lookup_is_a_miss(
    fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    fake.error = ZeroDivisionError()
    lookups.ask("r", [([namespace("a")], KEYS)])
    assert answered(lookups, "r") == (bytes(4),)
    lookups.close()
    assert "a lookup failed" in caplog.text


def test_too_many_pending_lookups_are_misses(
    fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.blocks.lookups.PENDING_MAX", 3)
    fake.gate.clear()
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    for number in range(5):
        lookups.ask(f"r{number}", [([namespace("a")], KEYS)])
    assert [lookups.answer(f"r{number}") for number in range(5)] == [None] * 3 + [(bytes(4),)] * 2
    fake.gate.set()
    lookups.close()


def test_dropped_lookups_have_no_answer(fake: FakeClient) -> None:
    fake.gate.clear()
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    lookups.ask("r", [([namespace("a")], KEYS)])
    lookups.drop_all()
    fake.gate.set()
    lookups.close()
    assert lookups.answer("r") == ()


def test_empty_lookup_makes_no_call(fake: FakeClient) -> None:
    lookups = Lookups(ThreadLookups(fake), 5.0)  # type: ignore[arg-type]
    lookups.ask("r", [([namespace("a")], [])])
    assert lookups.answer("r") == (b"",)
    lookups.close()
    assert fake.calls == []


def test_lookup_of_a_real_node_on_every_wire(client: Client) -> None:
    name, page = namespace(f"lookups {client.config.wire}"), bytes(4096)
    client.put(name, KEYS[:2], [page, page])
    lookups = Lookups(ThreadLookups(client), 5.0)
    lookups.open([name])
    lookups.touch("a request", [([name], KEYS)])
    lookups.ask("r", [([name, name], KEYS)])
    assert answered(lookups, "r") == (b"\1\1\0\0",)
    lookups.close()


def test_unreachable_node_is_a_miss(shared_node: NodeProcess) -> None:
    with Client(ClientConfig(address="127.0.0.1:1")) as client:
        lookups = Lookups(ThreadLookups(client), 1.0)
        lookups.ask("r", [([namespace("a")], KEYS)])
        assert answered(lookups, "r") == (bytes(4),)
        lookups.close()


def test_later_shards_are_asked_only_for_pages_that_earlier_ones_have() -> None:
    asked = []

    class Recording(FakeClient):
        def lookup(self, namespace: Namespace, keys: Any, *more: Any, **named: Any) -> LookupResult:
            asked.append((namespace.model, list(keys)))
            return super().lookup(namespace, keys, *more, **named)

    client: Any = Recording({"a": set(KEYS[:3]), "b": {KEYS[0], KEYS[2]}, "c": set(KEYS)})
    shards = [namespace(name) for name in "abc"]
    with contextlib.closing(Lookups(ThreadLookups(client), 5.0)) as lookups:
        lookups.ask("r", [(shards, KEYS)])
        assert answered(lookups, "r") == (bytes([1, 0, 1, 0]),)
        lookups.ask("miss", [(shards, KEYS[3:])])
        assert answered(lookups, "miss") == (bytes([0]),)
    assert asked == [("a", KEYS), ("b", KEYS[:3]), ("c", [KEYS[0], KEYS[2]]), ("a", KEYS[3:])]
