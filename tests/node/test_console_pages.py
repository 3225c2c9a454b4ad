"""Looking up pages through the console, and what it removes."""

from types import SimpleNamespace
from typing import Any

import pytest
from local_nodes import StartNode
from visits import told, visit

from kvstore import Client, ClientConfig, LayerGroup, Namespace, PageLayout, Plane
from kvstore.errors import InvalidRequest
from kvstore.identities import Principal, Role
from kvstore.layout import PageLayout as Layout
from kvstore.messages import layout_value
from kvstore.pb import kvstore_pb2 as pb
from node.console.console import SCRUB_NBYTES, Acts
from node.console.pages import BYTES_MAX, FOUND_MAX
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


def test_a_whole_key_tells_the_page_and_its_layout(stored: Node) -> None:
    status, values = look_up(stored, KEYS[3].hex())
    assert status == 200
    assert [page["prefix_hash"] for page in values["pages"]] == [KEYS[3].hex()]
    assert values["pages"][0]["in_ram"]
    assert layout_of(values["namespace"]["layout"]) == LAYOUT
    assert values["namespace"]["model"] == SPACE.model
    assert values["owners"] == []


def test_a_part_of_a_key_finds_those_that_begin_so(stored: Node) -> None:
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


def test_half_a_byte_is_found_however_many_begin_like_the_other_half(stored: Node) -> None:
    """Of the first that begin with the whole bytes all could be of other halves: the page was said
    not to be there.
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


@pytest.mark.parametrize("key", ["", "abc", "xyz1", "ab cd", "é" * 8, "a" * 129, None, 7, ["abcd"]])
def test_invalid_key_is_refused(stored: Node, key: Any) -> None:
    status, values = told(stored, "/console/look-up", {"namespace": SPACE.digest.hex(), "key": key})
    assert status == 400
    assert "key" in values["error"]


def test_a_namespace_that_is_not_there_is_said_so(stored: Node) -> None:
    assert look_up(stored, "abcd", b"\1" * 16)[0] == 404
    assert told(stored, "/console/look-up", {"namespace": "abcd", "key": "abcd"})[0] == 400
    assert told(stored, "/console/look-up", {})[0] == 400


def read(node: Node, key: bytes, offset: Any, nbytes: Any) -> tuple[int, bytes]:
    values = {"namespace": SPACE.digest.hex(), "key": key.hex(), "offset": offset, "nbytes": nbytes}
    status, _, body = visit(node, "/console/bytes", values)
    return status, body


def test_the_bytes_of_a_page_are_those_that_were_stored(stored: Node) -> None:
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


def test_bytes_are_read_in_parts_of_bounded_size(stored: Node) -> None:
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
        "not for want of bytes"
    )
    assert read(stored, KEYS[0], LAYOUT.page_nbytes - 1, 2)[0] == 400
    status, body = read(stored, b"\1" * 32, 0, 4)
    assert (status, b"not here" in body) == (200, True)
    assert stored.service.sessions.count == 0


def test_a_page_is_removed_and_nothing_else(stored: Node) -> None:
    asked = {"act": "remove", "namespace": SPACE.digest.hex(), "key": KEYS[-1].hex()}
    assert told(stored, "/console/act", asked) == (200, {"removed": [True], "view_number": 0})
    assert told(stored, "/console/act", asked)[1]["removed"] == [False]
    with _client(stored) as client:
        assert client.lookup(SPACE, KEYS).prefix_pages == len(KEYS) - 1
    for act in ("remove_namespace", "drain", "put", "", None, 5, ["flush"]):
        assert told(stored, "/console/act", {**asked, "act": act})[0] == 400, act


def test_a_member_tells_who_owns_a_page_and_removes_none(start_node: StartNode) -> None:
    node = start_node(cluster="static:fleet/n1=127.0.0.1:1,n2=127.0.0.1:2", member="n1", replicas=2)
    with _client(node, direct=True) as client:
        client.lookup(SPACE, KEYS[:1])
    values = look_up(node, KEYS[0].hex())[1]
    assert node.membership.view is not None
    assert values["owners"] == list(node.membership.view.owners.owners(SPACE.digest, KEYS[:1])[0])
    assert len(values["owners"]) == 2
    asked = {"act": "remove", "namespace": SPACE.digest.hex(), "key": KEYS[0].hex()}
    status, told_ = told(node, "/console/act", asked)
    assert status == 400
    assert "kvstore rm" in told_["error"]


def test_a_scrub_goes_on_from_where_it_was() -> None:
    asked: list[Any] = []
    authorizer = SimpleNamespace(principal_of=lambda caller: Principal("root", "*", Role.ADMIN))
    service: Any = SimpleNamespace(
        authorizer=authorizer, call=lambda op, request, caller: (asked.append(request), request)[1]
    )
    nobody: Any = None
    acts = Acts(service, nobody)
    acts.do({"act": "scrub"}, nobody)
    acts.do({"act": "scrub", "cursor": "abcd"}, nobody)
    assert [request.cursor for request in asked] == [b"", b"\xab\xcd"]
    assert {request.nbytes_max for request in asked} == {SCRUB_NBYTES}
    assert SCRUB_NBYTES <= SCRUB_NBYTES_MAX
    for cursor in (5, "xyz", None):
        with pytest.raises(InvalidRequest, match="cursor"):
            acts.do({"act": "scrub", "cursor": cursor}, nobody)
