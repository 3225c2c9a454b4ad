"""Formats of users' files and digests of namespaces stay as in golden/files.json, which was made
without the project's code.

A changed digest would empty every cache at an upgrade; a changed file format could lock users out
or let others in.
"""

import dataclasses
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import xxhash

from gpu_agent.identity.checkpoint import config_digest, weight_files, weights_digest
from gpu_agent.options import Identity, facts_text
from kvstore import opaque_layout
from kvstore.page_hmac import page_keys
from kvstore.security.identities import Principal, Role, new_token, parse, token_hash, token_line
from node.auth.quotas import quota_of

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "files.json").read_text()
)


def test_identities_file_keeps_its_format() -> None:
    example = GOLDEN["identities"]
    assert hashlib.sha256(example["token"].encode()).hexdigest() in example["lines"][0]
    found = parse("".join(f"{line}\n" for line in example["lines"]), quota_of)
    assert found.problems == []
    assert found.tokens == {
        token_hash(example["token"]): Principal("ci", "team-a", Role.WRITE, ("llama-*", "qwen-*"))
    }
    gpu = found.certificates["gpu-7"]
    assert (gpu.tenant, gpu.role, gpu.expires_s) == ("*", Role.NODE, 1798761600.0)
    assert found.certificates["root"].role is Role.ADMIN
    assert found.certificates["eye"] == Principal("eye", "team-b", Role.READ, (), math.inf)
    assert dataclasses.asdict(quota_of(found.quotas["team-a"])) == example["quota"]
    (share,) = found.shares
    assert (share.tenant, share.models, share.others) == (
        "team-a",
        ("prompts-*",),
        ("team-b", "team-c"),
    )


def test_token_keeps_its_format_and_hash() -> None:
    example = GOLDEN["identities"]
    assert new_token("team-a").startswith(example["token"].partition(".")[0] + ".")
    line = token_line(
        "ci", example["token"], tenant="team-a", role="write", models="llama-*,qwen-*"
    )
    assert sorted(line.split()) == sorted(example["lines"][0].split())


def test_facts_of_an_engine_keep_their_text() -> None:
    example = GOLDEN["facts"]
    assert facts_text(example["engine"], **example["facts"]) == example["text"]


def test_configuration_and_weights_keep_their_digests(tmp_path: Path) -> None:
    example = GOLDEN["checkpoint"]
    counted = {
        name: value for name, value in example["config"].items() if name != "transformers_version"
    }
    digest = hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:32]
    assert config_digest(example["config"]) == digest == example["config_digest"]
    for name, text in example["files"].items():
        (tmp_path / name).write_text(text)
    running = xxhash.xxh3_128()
    for name in ("config.json", "model.safetensors"):
        running.update(f"{name} {len(example['files'][name])}\n{example['files'][name]}".encode())
    digest = f"weights={running.hexdigest()}"
    assert weights_digest(weight_files(tmp_path)) == digest == example["weights_digest"]


def test_namespace_of_an_adapter_keeps_its_digest() -> None:
    example = GOLDEN["namespace"]
    identity = Identity(**example["identity"])
    space = identity.namespace(opaque_layout(4096, 16), example["facts"], tp_rank=1, tp_size=2)
    assert space.layout.canonical.decode() == example["canonical"]
    assert space.salt == example["fields"]["salt"]
    assert space.digest.hex() == example["digest"] == _digest(example)


def _digest(example: dict[str, Any]) -> str:
    """Return the digest of a namespace as docs/FORMAT.md defines it under "Keys"."""
    values = {name: text.encode() for name, text in example["fields"].items()}
    values["layout"] = hashlib.sha256(example["canonical"].encode()).digest()
    data = b"kvstore-namespace-1\0"
    for name in sorted(values):
        data += (
            struct.pack("<I", len(name))
            + name.encode()
            + struct.pack("<I", len(values[name]))
            + values[name]
        )
    return hashlib.sha256(data).hexdigest()[:32]


def test_page_key_file_keeps_its_format(tmp_path: Path) -> None:
    example = GOLDEN["page_key"]
    (tmp_path / "key").write_text(example["file"])
    (tmp_path / "key").chmod(0o400)
    keys = page_keys(Identity(page_key_file=str(tmp_path / "key")))
    assert keys is not None
    assert keys.key_id == example["key_id"]
