"""Conversion of namespaces, layouts and results from and to protobuf."""

from dataclasses import fields
from typing import Any

import pytest

from kvstore import InvalidRequest, LayerGroup, Namespace, PageLayout, Plane
from kvstore.messages import (
    chunk_frame,
    chunk_of,
    namespace_message,
    namespace_value,
    plain,
    result,
)
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import Counters, NamespaceInfo
from kvstore.results.conversion import RESULTS

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
    *("m", LAYOUT, "t", "r", 1, 2, 3, 4, 5, 6, "salt é", 2**64 - 1, "0123456789abcdef"),
    part="0123456789abcdef.0/2",
)


def test_namespace_survives_the_wire() -> None:
    data = namespace_message(NAMESPACE).SerializeToString()
    again = namespace_value(pb.Namespace.FromString(data))
    assert again == NAMESPACE
    assert again.part == NAMESPACE.part
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
    about: dict[str, Any] = {"digest": NAMESPACE.digest, "namespace": NAMESPACE, "page_nbytes": 8}
    names = [field.name for field in fields(Counters)]
    one, two = (Counters(**dict.fromkeys(names, count)) for count in (3, 30))
    both = NamespaceInfo(**about, page_count=1, disk_page_count=2, counters=one) + NamespaceInfo(
        **about, page_count=10, disk_page_count=20, counters=two
    )
    summed: dict[str, Any] = {
        "page_count": 11,
        "disk_page_count": 22,
        "counters": one + two,
    }
    assert both == NamespaceInfo(**about, **summed)
    assert one + two == Counters(**dict.fromkeys(names, 33))
    assert {*about, *summed} == {field.name for field in fields(NamespaceInfo)}


def filled(message: Any) -> Any:
    """Return the message with a value in each field, and in each field of its parts."""
    samples = {str: "s", bytes: b"b", bool: True, int: 1, float: 0.5}
    for field in message.DESCRIPTOR.fields:
        value, part = getattr(message, field.name), field.message_type
        if part is not None and part.name == "Namespace":
            value.CopyFrom(namespace_message(NAMESPACE))
        elif part is not None:
            filled(value if hasattr(value, "DESCRIPTOR") else value.add())
        elif type(value) in samples:
            setattr(message, field.name, samples[type(value)])
        else:
            value.append(of_list(field))
    return message


def of_list(field: Any) -> Any:
    if field.cpp_type != field.CPPTYPE_STRING:
        return 1
    return b"b" if field.type == field.TYPE_BYTES else "s"


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_results_have_all_fields_of_their_message_and_ignore_unknown_ones(name: str) -> None:
    """Each field of a message, and of the messages in it, reaches the dataclass as it is.

    This fails when a field or a message is added to the proto file without its dataclass.
    """
    message = filled(getattr(pb, name)())
    found = result(message)
    assert [field.name for field in fields(found)] == [f.name for f in message.DESCRIPTOR.fields]
    assert plain(found) == plain(message), "values differ, or a nested field is missing"
    assert bool(found)
    newer = message.SerializeToString() + b"\xfa\x7f\x01x"  # field 2047
    assert result(type(message).FromString(newer)) == found


def test_every_reply_that_clients_return_has_a_dataclass() -> None:
    """Replies without one are read by the client, or returned as bools and numbers."""
    own = {*RESULTS, *("HelloReply", "OpenNamespaceReply", "ListNamespacesReply", "LookupReply")}
    own |= {*("PutReply", "CommitReply", "GetReply", "VerifyReply", "RemoveReply", "PinReply")}
    own |= {*("UnpinReply", "ListReply", "StatReply", "RemoveNamespaceReply", "FlushReply")}
    own |= {*("RecoverReply", "AdmitReply", "View", "Error", "FeedReply", "HintReply")}
    own.add("QueryReply")
    replies = {field.message_type.name for field in pb.BulkReply.DESCRIPTOR.fields}
    assert replies <= own


def test_parts_that_a_status_lacks_are_false() -> None:
    status = result(pb.NodeStatusReply(state="SERVING", disk=pb.DiskStatus(state="SERVING")))
    assert status.disk
    assert not status.ram
    assert status.ram.used_nbytes == 0
    with pytest.warns(DeprecationWarning, match=r"if status\.disk"):
        assert status.HasField("disk")


def test_namespace_of_a_newer_node_does_not_hide_its_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status = filled(pb.NodeStatusReply())
    newer = status.namespaces.add()
    newer.CopyFrom(status.namespaces[0])
    newer.namespace.layout.groups[0].planes[0].dtype = "float3"
    found = result(status)
    assert [info.namespace for info in found.namespaces] == [NAMESPACE]
    assert found.state == status.state
    assert "float3" in caplog.text
