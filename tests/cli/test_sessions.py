"""Sessions of a trace: what their clients know, and what a store makes of it."""

import io
import itertools
import json
from array import array

import pytest

from kvstore import Client, ClientConfig
from kvstore.errors import InvalidRequest
from kvstore.results.replies import Recorded, RecordedUse
from kvstore.tools.hit_curve import Curve, Stack
from kvstore.tools.replay import replay, replay_namespace, throwaway_node
from kvstore.tools.sessions import FIRST_PAUSE_MS, SessionClients, agents, hit_rate, with_sessions
from kvstore.tools.trace import Recording, TraceRequest


def request(at_ms: float, session: str = "s", ended: bool = False) -> TraceRequest:
    return TraceRequest(at_ms, 0, 0, (1, 2), session=session, ended=ended)


def test_client_knows_its_own_pauses_and_never_the_future() -> None:
    clients = SessionClients()
    told = [clients.after(request(at_ms)) for at_ms in (0.0, 10.0, 40.0)]
    assert [each.ttl_ms for each in told if each] == [2 * FIRST_PAUSE_MS, 20.0, 40.0]
    another = clients.after(request(50.0, "t"))
    assert another is not None
    assert another.ttl_ms == 40.0, "the mean of all pauses before"
    over = clients.after(request(60.0, ended=True))
    assert over is not None
    assert over.over
    assert clients.after(request(60.0, session="")) is None


def test_sessions_of_a_trace_without_them_follow_its_chains() -> None:
    chains = [(1, 2), (1, 5), (1, 2, 3), (9,), (1, 5, 6, 7), (1, 2, 3, 4)]
    named = with_sessions(TraceRequest(0, 0, 0, chain) for chain in chains)
    assert [each.session for each in named] == ["0", "1", "0", "2", "1", "0"]


@pytest.mark.parametrize("capacity", [150, 400])
def test_simulated_store_without_hints_is_exact_lru(capacity: int) -> None:
    requests = agents(300, seed=3, at_a_time=12)
    stack, curve, asked = Stack(), Curve(), 0
    for each in requests:
        asked += len(each.hash_ids)
        for reuse in stack.use(array("Q", each.hash_ids).tobytes()):
            curve.add(reuse)
    if max(len(each.hash_ids) for each in requests) <= capacity:
        assert hit_rate(requests, capacity, hinted=False) == curve.hits(capacity) / asked
    assert 0 <= hit_rate(requests, capacity, hinted=True) <= 1


def test_recorded_hints_are_requests_with_a_session() -> None:
    recording = Recording(io.BytesIO())
    uses = [
        RecordedUse(0, False, 4096, 16.0, (5, 6)),
        RecordedUse(1, True, 4096, 16.0, (5, 6), session=255, ended=True),
    ]
    recording.add(Recorded(uses=tuple(uses)))
    asked, hinted = map(json.loads, recording.lines())
    assert "session" not in asked
    assert (hinted["session"], hinted["ended"], hinted["stored"]) == ("ff", True, True)


def test_generated_agents_grow_and_end() -> None:
    requests = agents(400, seed=2, at_a_time=8)
    times = [each.timestamp_ms for each in requests]
    assert times == sorted(times)
    by_session: dict[str, list[TraceRequest]] = {}
    for each in requests:
        by_session.setdefault(each.session, []).append(each)
    for some in by_session.values():
        assert [each.ended for each in some[:-1]] == [False] * (len(some) - 1)
        for one, next_one in itertools.pairwise(some):
            assert next_one.hash_ids[: len(one.hash_ids)] == one.hash_ids


def test_node_obeys_the_hints_of_a_replay_as_the_simulation_does() -> None:
    # Each long session is used again once; one-off chains in between push it out of an LRU
    requests = [request(0.0, "long")._replace(hash_ids=tuple(range(8)))]
    requests += [
        TraceRequest(float(each), 0, 0, (100 + each,), session=f"{each}", ended=True)
        for each in range(1, 40)
    ]
    requests.append(request(40.0, "long", ended=True)._replace(hash_ids=tuple(range(8))))
    with (
        throwaway_node(16, 4096) as node,
        Client(ClientConfig(address=node.address, timeout_s=60.0)) as client,
    ):
        plain = replay(client, requests, replay_namespace(4096))
        hinted = replay(client, requests, replay_namespace(4096), speed=1.0, hints=True)
        with pytest.raises(InvalidRequest, match="speed"):
            replay(client, requests, replay_namespace(4096), hints=True)
    assert (plain.pages_hit, hinted.pages_hit) == (0, 8)
    assert hinted.hinted_pages >= 8
    assert hit_rate(requests, 16, hinted=False) == 0
    assert hit_rate(requests, 16, hinted=True) == 8 / sum(len(each.hash_ids) for each in requests)
