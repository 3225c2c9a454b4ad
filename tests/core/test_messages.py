"""Conversion of namespaces and layouts to protobuf and back."""

import pytest

from kvstore import InvalidRequest, LayerGroup, Namespace, PageLayout, Plane
from kvstore.messages import add_counts, chunk_frame, chunk_of, namespace_message, namespace_value
from kvstore.pb import kvstore_pb2 as pb

LAYOUT = PageLayout(
    16,
    (
        LayerGroup(
            "full", (0, 2), (Plane("k", "bfloat16", (8, 128)), Plane("v", "float8_e5m2", (8, 64)))
        ),
        LayerGroup("index", (1,), (Plane("row", "uint8", (132,), 16),)),
    ),
)
NAMESPACE = Namespace(
    "m", LAYOUT, "t", "r", 1, 2, 3, 4, 5, 6, "salt é", 2**64 - 1, "0123456789abcdef"
)


def test_namespace_survives_the_wire() -> None:
    data = namespace_message(NAMESPACE).SerializeToString()
    again = namespace_value(pb.Namespace.FromString(data))
    assert again == NAMESPACE
    assert again.digest == NAMESPACE.digest


def test_every_message_field_is_used() -> None:
    message = namespace_message(NAMESPACE)
    assert {field.name for field, _ in message.ListFields()} == set(
        pb.Namespace.DESCRIPTOR.fields_by_name
    )


@pytest.mark.parametrize("field", ["layout", "model", "tenant", "tp_size", "pp_size", "cp_size"])
def test_message_without_a_required_field_is_refused(field: str) -> None:
    message = namespace_message(NAMESPACE)
    message.ClearField(field)
    with pytest.raises(InvalidRequest, match=f"namespace: .*{field}"):
        namespace_value(message)


def test_empty_layout_is_refused() -> None:
    message = namespace_message(NAMESPACE)
    message.layout.Clear()
    message.layout.SetInParent()
    with pytest.raises(InvalidRequest, match="layout: page_tokens 0"):
        namespace_value(message)


@pytest.mark.parametrize("nbytes", [1, 100, 127, 128, 16_380, 1 << 20])
def test_chunk_frames_equal_those_of_protobuf(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    pieces = [memoryview(data)[: nbytes // 3], memoryview(data)[nbytes // 3 : nbytes]]
    for frame in (pb.GetFrame, pb.PutFrame):
        expected = frame(chunk=pb.PageChunk(data=data[:nbytes])).SerializeToString()
        assert chunk_frame(pieces) == expected
        assert chunk_of(expected) == data[:nbytes]


def test_other_messages_than_chunks_are_parsed_by_protobuf() -> None:
    whole = pb.PutFrame(chunk=pb.PageChunk(data=b"page bytes")).SerializeToString()
    begin = pb.PutFrame(begin=pb.PutRequest(namespace=b"n" * 16)).SerializeToString()
    empty = pb.PutFrame(chunk=pb.PageChunk()).SerializeToString()
    # With a field that a later version may add
    more = pb.PageChunk(data=b"page").SerializeToString() + b"\x50\x01"
    later = whole[:1] + bytes([len(more)]) + more
    assert pb.PutFrame.FromString(later).chunk.data == b"page"
    for frame in (
        b"",
        begin,
        empty,
        later,
        whole[:1] + bytes([whole[1] - 1]) + whole[2:],
        whole[:1] + bytes([whole[1] + 1]) + whole[2:],
        whole[:-1],
        whole + b"\x00",
        whole + whole,
        b"\x12",
        b"\x12\xff\xff\xff\xff\xff\xff",
    ):
        assert chunk_of(frame) is None


def test_counts_of_nodes_are_summed_completely() -> None:
    one = pb.NamespaceInfo(page_count=1, disk_page_count=2, counters=pb.Counters(pages_put=3))
    two = pb.NamespaceInfo(
        page_count=10, disk_page_count=20, counters=pb.Counters(pages_put=30, miss_absent=40)
    )
    add_counts(one, two)
    counters = pb.Counters(pages_put=33, miss_absent=40)
    assert one == pb.NamespaceInfo(page_count=11, disk_page_count=22, counters=counters)
    described = {"digest", "namespace", "page_nbytes"}
    summed = {field.name for field, _ in one.ListFields()}
    assert described | summed == set(pb.NamespaceInfo.DESCRIPTOR.fields_by_name)
