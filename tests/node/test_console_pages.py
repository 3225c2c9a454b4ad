"""Looking up, reading and removing pages through the console."""

from types import SimpleNamespace
from typing import Any

import pytest
from local_nodes import StartNode
from visits import told, visit

from kvstore import Client, ClientConfig, LayerGroup, Namespace, PageLayout, Plane
from kvstore.errors import InvalidRequest
from kvstore.layout import PageLayout as Layout
from kvstore.messages import layout_value
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal, Role
from node.console.console import SCRUB_NBYTES, Acts
from node.console.pages import BYTES_MAX, FOUND_MAX, LISTED_MAX
from node.server import Node
from node.serving.limits import SCRUB_NBYTES_MAX

PLANES = (Plane("k", "bfloat16", (2, 8)), Plane("v", "float8_e4m3fn", (16,)))
LAYOUT = PageLayout(4, (LayerGroup("attention", (0, 1), PLANES),))
SPACE = Namespace("<script>alert(1)</script>", LAYOUT)
KEYS = [b"\xab\xcd" + bytes([number]) * 30 for number in range(FOUND_MAX + 2)]
PAGE = bytes(range(LAYOUT.page_nbytes % 256)) + bytes(LAYOUT.page_nbytes - LAYOUT.page_nbytes % 256)


@pytest.fixture(scope="module")
def stored(start_node: StartNode) -> Node:
    node: Node = start_node()
    with _client(node) as client:
        client.put(SPACE, KEYS, [PAGE] * len(KEYS))
    return node


def _client(node: Node, **settings: Any) -> Client:
    return Client(ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=30.0, **settings))


def look_up(node: Node, key: str, digest: bytes = SPACE.digest) -> tuple[int, dict[str, Any]]:
    return told(node, "/console/look-up", {"namespace": digest.hex(), "key": key})


def layout_of(values: dict[str, Any]) -> Layout:
    message = pb.PageLayout(page_tokens=values["page_tokens"])
    for group in values["groups"]:
        planes = [pb.Plane(**plane) for plane in group["planes"]]
        message.groups.append(
            pb.LayerGroup(name=group["name"], layers=group["layers"], planes=planes)
        )
    return layout_value(message)


def test_full_key_returns_the_page_and_its_layout(stored: Node) -> None:
    status, values = look_up(stored, KEYS[3].hex())
    assert status == 200
    assert [page["prefix_hash"] for page in values["pages"]] == [KEYS[3].hex()]
    assert values["pages"][0]["in_ram"]
    assert layout_of(values["namespace"]["layout"]) == LAYOUT
    assert values["namespace"]["model"] == SPACE.model
    assert values["owners"] == []


def test_partial_key_returns_pages_with_that_prefix(stored: Node) -> None:
    assert [page["prefix_hash"] for page in look_up(stored, "ABCD0303")[1]["pages"]] == [
        KEYS[3].hex()
    ]
    assert [page["prefix_hash"] for page in look_up(stored, "abcd03030")[1]["pages"]] == [
        KEYS[3].hex()
    ]
    assert look_up(stored, "abcd03031")[1]["pages"] == []
    values = look_up(stored, "abcd")[1]
    assert (len(values["pages"]), values["more"]) == (FOUND_MAX, True)
    assert look_up(stored, "ffff")[1]["pages"] == []
    assert look_up(stored, (b"\1" * 32).hex())[1]["pages"] == []


def test_partial_key_of_odd_length_skips_other_half_bytes(stored: Node) -> None:
    """Regression: pages were reported absent when enough others began with the same whole bytes but
    another half byte.
    """
    space = Namespace("halves", LAYOUT)
    many = [
        bytes((0xAB, 0xCD, number // 2)) + bytes([number]) * 29 for number in range(20 * FOUND_MAX)
    ]
    wanted = [b"\xab\xcd\xf0" + b"y" * 29, b"\xab\xcd\xff" + b"y" * 29]
    with _client(stored) as client:
        client.put(space, [*many, *wanted], [PAGE] * (len(many) + len(wanted)))
    found = look_up(stored, "abcdf", space.digest)[1]
    assert [page["prefix_hash"] for page in found["pages"]] == [key.hex() for key in wanted]
    assert [
        page["prefix_hash"][:5] for page in look_up(stored, "abcd0", space.digest)[1]["pages"]
    ] == ["abcd0"] * 8
    assert look_up(stored, "abcde", space.digest)[1]["pages"] == []


def test_lookup_without_a_key_lists_the_first_pages(stored: Node) -> None:
    values = look_up(stored, "")[1]
    listed = [page["prefix_hash"] for page in values["pages"]]
    assert listed == sorted(listed)
    assert (len(listed), values["more"]) == (min(LISTED_MAX, len(KEYS)), len(KEYS) > LISTED_MAX)


@pytest.mark.parametrize("key", ["abc", "xyz1", "ab cd", "é" * 8, "a" * 129, None, 7, ["abcd"]])
def test_invalid_key_is_refused(stored: Node, key: Any) -> None:
    status, values = told(stored, "/console/look-up", {"namespace": SPACE.digest.hex(), "key": key})
    assert status == 400
    assert "key" in values["error"]


def test_lookup_in_unknown_namespace_is_refused(stored: Node) -> None:
    assert look_up(stored, "abcd", b"\1" * 16)[0] == 404
    assert told(stored, "/console/look-up", {"namespace": "abcd", "key": "abcd"})[0] == 400
    assert told(stored, "/console/look-up", {})[0] == 400


def read(node: Node, key: bytes, offset: Any, nbytes: Any) -> tuple[int, bytes]:
    values = {"namespace": SPACE.digest.hex(), "key": key.hex(), "offset": offset, "nbytes": nbytes}
    status, _, body = visit(node, "/console/bytes", values)
    return status, body


def test_read_bytes_equal_the_stored_page(stored: Node) -> None:
    assert read(stored, KEYS[0], 0, LAYOUT.page_nbytes) == (200, PAGE)
    assert read(stored, KEYS[0], 7, 30) == (200, PAGE[7:37])
    assert stored.service.traffic.moved()["console", "out"] >= LAYOUT.page_nbytes + 30
    assert {wire for wire, _ in stored.service.traffic.moved()} <= {
        "bulk",
        "shm",
        "grpc",
        "console",
    }
    assert stored.tier.held_count == 0


def test_read_of_invalid_range_is_refused(stored: Node) -> None:
    for offset, nbytes in (
        (0, BYTES_MAX + 1),
        (0, 0),
        (-1, 4),
        (0, True),
        (0, "4"),
        (1 << 63, 4),
        (1 << 64, 1),
        (0, None),
    ):
        assert read(stored, KEYS[0], offset, nbytes)[0] == 400, (offset, nbytes)
    assert f"not in 1..{BYTES_MAX}".encode() in read(stored, KEYS[0], 0, BYTES_MAX + 1)[1], (
        "the error must name the limit of a read"
    )
    assert read(stored, KEYS[0], LAYOUT.page_nbytes - 1, 2)[0] == 400
    status, body = read(stored, b"\1" * 32, 0, 4)
    assert (status, b"not here" in body) == (200, True)
    assert stored.service.sessions.count == 0


def test_console_removes_one_page_and_refuses_other_acts(stored: Node) -> None:
    asked = {"act": "remove", "namespace": SPACE.digest.hex(), "key": KEYS[-1].hex()}
    assert told(stored, "/console/act", asked) == (200, {"removed": [True], "view_number": 0})
    assert told(stored, "/console/act", asked)[1]["removed"] == [False]
    with _client(stored) as client:
        assert client.lookup(SPACE, KEYS).prefix_pages == len(KEYS) - 1
    for act in ("remove_namespace", "drain", "put", "", None, 5, ["flush"]):
        assert told(stored, "/console/act", {**asked, "act": act})[0] == 400, act


def test_member_shows_owners_and_refuses_removal(start_node: StartNode) -> None:
    node = start_node(cluster="static:fleet/n1=127.0.0.1:1,n2=127.0.0.1:2", member="n1", replicas=2)
    with _client(node, direct=True) as client:
        client.lookup(SPACE, KEYS[:1])
    values = look_up(node, KEYS[0].hex())[1]
    assert node.membership.view is not None
    assert values["owners"] == list(node.membership.view.owners.owners(SPACE.digest, KEYS[:1])[0])
    assert len(values["owners"]) == 2
    asked = {"act": "remove", "namespace": SPACE.digest.hex(), "key": KEYS[0].hex()}
    status, refused = told(node, "/console/act", asked)
    assert status == 400
    assert "kvstore rm" in refused["error"]


def test_scrub_continues_from_its_cursor() -> None:
    asked: list[Any] = []
    authorizer = SimpleNamespace(principal_of=lambda caller: Principal("root", "*", Role.ADMIN))
    service: Any = SimpleNamespace(
        authorizer=authorizer, call=lambda op, request, caller: (asked.append(request), request)[1]
    )
    unused: Any = None
    acts = Acts(service, unused)
    acts.do({"act": "scrub"}, unused)
    acts.do({"act": "scrub", "cursor": "abcd"}, unused)
    assert [request.cursor for request in asked] == [b"", b"\xab\xcd"]
    assert {request.nbytes_max for request in asked} == {SCRUB_NBYTES}
    assert SCRUB_NBYTES <= SCRUB_NBYTES_MAX
    for cursor in (5, "xyz", None):
        with pytest.raises(InvalidRequest, match="cursor"):
            acts.do({"act": "scrub", "cursor": cursor}, unused)
