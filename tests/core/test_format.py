"""The examples of docs/FORMAT.md: golden bytes, recomputed independently of kvstore's code."""

import dataclasses
import hashlib
import json
import pathlib
import struct
from typing import Any

import pytest
import xxhash

from kvstore import LayerGroup, Namespace, PageLayout, Plane, prefix_hashes
from kvstore.checksum import checksum, key_seed, leaves
from kvstore.keys import block_part
from kvstore.page_hmac import PageHmacs, PageKeys
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed, unpack_fixed

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "format.json").read_text())


def layout_of(example: dict[str, Any]) -> PageLayout:
    groups = tuple(
        LayerGroup(
            name,
            tuple(layers),
            tuple(Plane(n, d, tuple(shape), tokens) for n, d, shape, tokens in planes),
        )
        for name, layers, planes in example["groups"]
    )
    return PageLayout(example["page_tokens"], groups)


@pytest.mark.parametrize("example", GOLDEN["layouts"], ids=lambda example: example["name"])
def test_layout_bytes(example: dict[str, Any]) -> None:
    assert hashlib.sha256(example["canonical"].encode()).hexdigest() == example["fingerprint"]
    layout = layout_of(example)
    assert layout.canonical == example["canonical"].encode()
    assert layout.fingerprint.hex() == example["fingerprint"]
    assert layout.page_nbytes == example["page_nbytes"]
    for layer, ranges in example["layer_ranges"].items():
        assert [list(part) for part in layout.layer_ranges(int(layer))] == ranges
    assert (
        sum(nbytes for ranges in example["layer_ranges"].values() for _, nbytes in ranges)
        == layout.page_nbytes
    )


def test_namespace_digest() -> None:
    example = GOLDEN["namespace"]
    values = {name: text.encode() for name, text in example["fields"].items()}
    values["layout"] = bytes.fromhex(example["layout_fingerprint"])
    assert namespace_digest(values).hex() == example["digest"]

    fields: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in example["fields"].items()}
    assert (
        Namespace(layout=layout_of(GOLDEN["layouts"][0]), **fields).digest.hex()
        == example["digest"]
    )


def namespace_digest(values: dict[str, bytes]) -> bytes:
    data = b"kvstore-namespace-1\0"
    for name in sorted(values):
        data += (
            struct.pack("<I", len(name))
            + name.encode()
            + struct.pack("<I", len(values[name]))
            + values[name]
        )
    return hashlib.sha256(data).digest()[:16]


def test_id_of_the_feeds_blocks() -> None:
    layout = layout_of(GOLDEN["layouts"][0])

    def digest(*texts: bytes) -> bytes:
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        return hashlib.sha256(b"kvstore-blocks-1\0" + data).digest()[:16]

    first = (b"t\xc3\xa9", b"m", b"r", b"7", b"")  # tenant, model, revision, epoch, key_id
    space = Namespace("m", layout, "té", "r", salt="s", epoch=7, tp_rank=1, tp_size=2, pp_size=3)
    own = block_part(space)
    assert own.id == digest(*first, b"s", layout.fingerprint, b"2", b"3", b"1")
    assert own[1:] == (0, 1, 3, 6), "group, groups, rank, ranks"
    name = "0123456789abcdef"
    part = block_part(dataclasses.replace(space, part=f"{name}.1/2:5"))
    assert part.id == digest(*first, name.encode())
    assert (part.group, part.groups, part.ranks) == (1, 2, 5)


def test_prefix_hashes() -> None:
    example = GOLDEN["prefix_hashes"]
    tokens = range(example["first_token"], example["first_token"] + example["token_count"])
    parent, step = b"", example["page_tokens"]
    for i, expected in enumerate(example["hashes"]):
        page = tokens[i * step : (i + 1) * step]
        parent = hashlib.sha256(parent + struct.pack(f"<{step}I", *page)).digest()
        assert parent.hex() == expected
    assert [h.hex() for h in prefix_hashes(tokens, step)] == example["hashes"]


def test_checksum() -> None:
    example = GOLDEN["checksum"]
    page = bytes(range(256)) * example["times"]
    digest, prefix_hash = (
        bytes.fromhex(GOLDEN["namespace"]["digest"]),
        bytes.fromhex(example["prefix_hash"]),
    )
    seed = int(example["seed"], 16)
    assert xxhash.xxh3_64(digest + prefix_hash).intdigest() == seed == key_seed(digest, prefix_hash)
    parts = [page[: 1 << 20], page[1 << 20 :]]  # a page of 2.5 MiB: a part of 1 MiB, and the rest
    of_parts = b"".join(xxhash.xxh3_64(part).digest() for part in parts)
    assert of_parts.hex() == example["leaves"] == leaves(page).hex()
    assert (
        xxhash.xxh3_128(of_parts, seed).hexdigest()
        == example["checksum"]
        == checksum(page, seed).hex()
    )
    (small,) = [xxhash.xxh3_64(page[:1024]).digest()]
    assert (
        xxhash.xxh3_128(small, seed).hexdigest()
        == example["checksum_of_first_KiB"]
        == checksum(page[:1024], seed).hex()
    )


def test_seal() -> None:
    example, page = GOLDEN["seal"], bytes(range(256)) * GOLDEN["checksum"]["times"]
    secret, prefix_hash = (
        bytes.fromhex(example["secret"]),
        bytes.fromhex(GOLDEN["checksum"]["prefix_hash"]),
    )
    key_id = hmac_sha256(secret, b"kvstore-page-key-id-1\0")[:8].hex()
    assert key_id == example["key_id"] == PageKeys(secret).key_id

    values = {name: text.encode() for name, text in GOLDEN["namespace"]["fields"].items()}
    values |= {
        "layout": bytes.fromhex(GOLDEN["namespace"]["layout_fingerprint"]),
        "key_id": key_id.encode(),
    }
    digest = namespace_digest(values)
    fields: dict[str, Any] = {
        k: int(v) if v.isdigit() else v for k, v in GOLDEN["namespace"]["fields"].items()
    }
    namespace = Namespace(layout=layout_of(GOLDEN["layouts"][0]), **fields, key_id=key_id)
    assert digest.hex() == example["digest"] == namespace.digest.hex()

    key = hmac_sha256(secret, b"kvstore-page-key-1\0" + digest)
    assert key.hex() == example["key"] == PageKeys(secret).key_for(digest).hex()
    seal = b""
    for number, part in enumerate((page[: 1 << 20], page[1 << 20 :])):
        named = struct.pack("<I", len(prefix_hash)) + prefix_hash + struct.pack("<II", number, 2)
        seal += hmac_sha256(key, b"kvstore-page-seal-1\0" + named + part)[:16]
    assert (
        seal.hex()
        == example["seal"]
        == PageHmacs(key, len(page)).sign(prefix_hash, (memoryview(page),)).hex()
    )


def hmac_sha256(key: bytes, data: bytes) -> bytes:
    """Compute the HMAC of RFC 2104, for keys of at most 64 bytes."""
    inner, outer = (bytes(byte ^ pad for byte in key.ljust(64, b"\0")) for pad in (0x36, 0x5C))
    return hashlib.sha256(outer + hashlib.sha256(inner + data).digest()).digest()


def test_bulk_frames() -> None:
    data = bytes.fromhex(GOLDEN["frames"]["lookup_request"])
    assert data[:4] == b"KV\x04\x00"
    header_nbytes, payload_nbytes = struct.unpack("<IQ", data[4:16])
    assert (
        (header_nbytes, payload_nbytes) == (len(data) - 16, 0) == unpack_fixed(data[:16], 1 << 20)
    )
    lookup = pb.BulkRequest.FromString(data[16:]).lookup
    assert lookup.namespace.hex() == GOLDEN["namespace"]["digest"]
    assert [h.hex() for h in lookup.prefix_hashes] == GOLDEN["prefix_hashes"]["hashes"][:1]
    assert lookup.touch
    assert pack_fixed(len(data) - 16, 0) + pb.BulkRequest(lookup=lookup).SerializeToString() == data
    assert pack_fixed(0, 1 << 20).hex() == GOLDEN["frames"]["page_data_of_1_MiB"]
