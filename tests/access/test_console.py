"""The console of a node with authentication shows and allows each caller only what it may."""

from itertools import islice
from typing import Any

import pytest
from people import PAGE_NBYTES, People, client, namespace, taken_up
from visits import first, history_of, told, visit, watching
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from node.console.console import NAMES
from node.server import Node
from node.serving.request_metrics import SLOW_NS

KEY = b"\xaa" * 32
OURS, THEIRS = namespace("team-a"), namespace("team-b")


@pytest.fixture(scope="module")
def stored(node: Node, people: People) -> Node:
    for who, space, byte in (("write", OURS, b"a"), ("other", THEIRS, b"b")):
        with client(node, people.tokens[who]) as there:
            there.put(space, [KEY], [byte * PAGE_NBYTES])
            there.lookup(space, [KEY])
    node.service.hot_prefixes._add((OURS.digest, KEY), 1)
    node.service.hot_prefixes._add((THEIRS.digest, KEY), 1)
    for space in (OURS, THEIRS):
        about = pb.GetRequest(namespace=space.digest, prefix_hashes=[KEY])
        node.service.traffic.slow.ended("get", "bulk", 0, SLOW_NS, None, about)
    node.service.traffic.slow.ended("list_namespaces", "bulk", 0, SLOW_NS)
    history = history_of(node)
    for _ in range(3):
        history._take(history._clock())
    return node


def test_console_page_needs_no_identity(stored: Node) -> None:
    refused = stored.audit.refused_count
    assert visit(stored, "/console/")[0] == 200
    assert all(visit(stored, f"/console/{name}")[0] == 200 for name in NAMES[1:])
    assert stored.audit.refused_count == refused


@pytest.mark.parametrize("path", ["events", "look-up", "bytes", "act"])
@pytest.mark.parametrize("who", ["nobody", "wrong", "expired", "revoked"])
def test_console_without_identity_shows_nothing(
    stored: Node, people: People, path: str, who: str
) -> None:
    refused = stored.audit.refused_count
    status, values = told(stored, f"/console/{path}", {}, people.tokens[who])
    assert (status, list(values)) == (401, ["error"])
    assert stored.audit.refused_count == refused + 1


def test_token_is_accepted_in_the_header_only(stored: Node, people: People) -> None:
    token = people.tokens["operator"]
    assert visit(stored, "/console/events", {"token": token}, Cookie=f"token={token}")[0] == 401
    assert visit(stored, f"/console/events?token={token}", {})[0] == 404
    assert visit(stored, "/console/events", {}, Authorization=f"Basic {token}")[0] == 401


def test_operator_sees_the_node_and_all_tenants(stored: Node, people: People) -> None:
    values = first(stored, people.tokens["operator"])
    assert {space["tenant"] for space in values["namespaces"]} >= {"team-a", "team-b"}
    assert values["ram"]["used_nbytes"] >= 2 * PAGE_NBYTES
    assert {hot["namespace"] for hot in values["hot"]} == {OURS.digest.hex(), THEIRS.digest.hex()}
    assert all(len(hot["head"]) == 8 for hot in values["hot"])
    recent = values["history"]["recent"]
    assert len(recent["times"]) == 2
    assert {"get_p99_ms", "lookup_p50_ms"} <= set(recent)
    assert {"put", "lookup"} <= {one["op"] for one in values["latencies"]}
    assert [call["subject"]["tenant"] for call in values["slow"]] == ["", "team-b", "team-a"]
    assert values["who"] == {
        "name": "operator",
        "tenant": "*",
        "role": "admin",
        "models": [],
        "asked": True,
    }


def test_tenant_sees_its_own_data_only(stored: Node, people: People) -> None:
    values = first(stored, people.tokens["read"])
    assert {space["tenant"] for space in values["namespaces"]} == {"team-a"}
    assert [use["tenant"] for use in values["tenants"]] == ["team-a"]
    assert {hot["namespace"] for hot in values["hot"]} == {OURS.digest.hex()}
    assert values["totals"]["pages_put"] == 1
    assert values["cluster"] is None
    assert not {
        "ram",
        "disk",
        "peers",
        "shm",
        "tls",
        "session_count",
        "rss_nbytes",
        "refused_calls",
    } & set(values)
    recent = values["history"]["recent"]
    assert not {name for name in recent if name.endswith("_ms")}
    assert recent["ram_nbytes"] == [PAGE_NBYTES, PAGE_NBYTES]
    assert "latencies" not in values
    (call,) = values["slow"]
    assert (call["subject"]["tenant"], call["subject"]["key"]) == ("team-a", "aaaaaaaa")
    assert THEIRS.digest.hex() not in str(values)
    assert "team-b" not in str(values)


def test_sum_of_bytes_covers_unlisted_namespaces(
    stored: Node, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the sum of bytes covered only the listed namespaces of a tenant with many."""
    monkeypatch.setattr("node.console.snapshot.NAMESPACES_MAX", 3)
    people.join("many", "team-many", "write")
    taken_up(
        stored,
        lambda: "team-many" in {who.tenant for who in stored.access.identities.tokens.values()},
    )
    with client(stored, people.tokens["many"]) as there:
        for number in range(5):
            there.put(namespace("team-many", f"model-{number}"), [KEY], [b"c" * PAGE_NBYTES])
    values = first(stored, people.tokens["many"])
    assert (len(values["namespaces"]), values["namespace_count"]) == (3, 5)
    assert values["page_nbytes"] == {"ram": 5 * PAGE_NBYTES, "disk": 0}


def test_identity_limited_to_models_does_not_see_other_models(stored: Node, people: People) -> None:
    for who in ("narrow", "modeller"):
        values = first(stored, people.tokens[who])
        assert (values["namespaces"], values["hot"], values["history"], values["samples"]) == (
            [],
            [],
            None,
            None,
        ), who
        assert values["slow"] == [], "calls on other models of its tenant"
        assert "ram" not in values


def test_pages_of_another_tenant_are_not_found(stored: Node, people: People) -> None:
    for path, more in (("look-up", {}), ("bytes", {"offset": 0, "nbytes": 4})):
        for space, status in ((OURS, 200), (THEIRS, 404)):
            asked = {"namespace": space.digest.hex(), "key": KEY.hex(), **more}
            assert visit(stored, f"/console/{path}", asked, people.tokens["read"])[0] == status, (
                path,
                space.tenant,
            )
    there = {"namespace": THEIRS.digest.hex(), "key": KEY.hex(), "offset": 0, "nbytes": 4}
    assert visit(stored, "/console/bytes", there, people.tokens["operator"])[2] == b"bbbb"


@pytest.mark.parametrize("act", ["flush", "scrub", "recover", "remove"])
def test_action_needs_an_administrator(stored: Node, people: People, act: str) -> None:
    asked: dict[str, Any] = {"act": act, "namespace": OURS.digest.hex(), "key": (b"\1" * 32).hex()}
    for who in ("read", "write"):
        status, values = told(stored, "/console/act", asked, people.tokens[who])
        assert (status, "in the console needs admin" in values["error"]) == (403, True), who
    assert told(stored, "/console/act", asked, people.tokens["admin"])[0] == (
        200 if act == "remove" else 403
    )
    others = {**asked, "namespace": THEIRS.digest.hex()}
    if act == "remove":
        assert told(stored, "/console/act", others, people.tokens["admin"])[0] == 404
    else:  # allowed, but an error, as this node has no disk
        assert told(stored, "/console/act", asked, people.tokens["operator"])[0] not in (401, 403)


def test_stream_ends_when_its_token_is_revoked(stored: Node, people: People) -> None:
    token = people.join("leaver", "team-a", "read")
    taken_up(
        stored, lambda: any(p.name == "leaver" for p in stored.access.identities.tokens.values())
    )
    with watching(stored, token) as events:
        assert next(events)[0] == "now"
        people.leave("leaver")
        taken_up(
            stored,
            lambda: all(p.name != "leaver" for p in stored.access.identities.tokens.values()),
        )
        *_, (name, values) = islice(events, 60)
    assert (name, list(values)) == ("end", ["error"])
    assert stored.console is not None
    watchers = stored.console.watchers
    wait_until(lambda: not watchers.used)


@pytest.mark.parametrize(("tenant", "role"), [("team-b", "read"), ("team-a", "admin")])
def test_stream_ends_when_its_token_changes_tenant_or_role(
    stored: Node, people: People, tenant: str, role: str
) -> None:
    def are(*wanted: str) -> bool:
        known = [p for p in stored.access.identities.tokens.values() if p.name == "mover"]
        return [(p.tenant, p.role.name.lower()) for p in known] == [wanted]

    token = people.join("mover", "team-a", "read")
    taken_up(stored, lambda: are("team-a", "read"))
    with watching(stored, token) as events:
        assert next(events)[0] == "now"
        people.change("mover", tenant, role)
        taken_up(stored, lambda: are(tenant, role))
        *seen, (name, values) = islice(events, 60)
    assert (name, "open it again" in values["error"]) == ("end", True)
    assert all({space["tenant"] for space in told["namespaces"]} == {"team-a"} for _, told in seen)
    people.leave("mover")


def test_host_with_a_domain_is_accepted_with_authentication(stored: Node, people: People) -> None:
    token = people.tokens["read"]
    assert visit(stored, "/console/", Host="node7.example.com")[0] == 200
    asked = {"namespace": OURS.digest.hex(), "key": KEY.hex()}
    assert visit(stored, "/console/look-up", asked, token, Host="node7.example.com")[0] == 200
