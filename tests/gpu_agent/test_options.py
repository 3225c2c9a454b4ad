"""What an adapter reads from its engine's configuration, and the name of a checkpoint."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_agent.checkpoint import named
from gpu_agent.options import Identity, facts_text, read_options
from kvstore import ConfigError, PageLayout
from kvstore.layout import LayerGroup, Plane

LAYOUT = PageLayout(16, (LayerGroup("full", (0, 1), (Plane("k", "float16", (2, 8)),)),))


def test_options_are_told_apart_by_whose_they_are() -> None:
    options = read_options(
        {"address": "store:7440", "tenant": "a", "load_timeout_s": "3", "flavour": "sweet"}, own=("flavour", "other")
    )
    assert options.client.address == "store:7440"
    assert options.identity.tenant == "a"
    assert options.agent.load_timeout_s == 3.0
    assert options.own == {"flavour": "sweet"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adress": "store:7440"}, r"unknown option 'adress' .* known are .*address"),
        ({"epoch": -1}, "epoch=-1 is outside"),
        ({"tenant": 7}, "tenant=7 must be a str"),
        ({"load_timeout_s": "soon"}, "load_timeout_s='soon' is no number"),
    ],
)
def test_a_wrong_option_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(values)


def test_facts_are_readable_and_long_ones_still_tell_apart() -> None:
    assert facts_text("vllm", backend="FLASH", kv_dtype="fp8") == "vllm backend=FLASH kv_dtype=fp8"
    one, other = (facts_text("vllm", a="x" * 2000, z=z) for z in "ab")
    assert one != other
    assert max(len(one), len(other)) <= 512


def test_every_field_of_an_identity_makes_another_namespace() -> None:
    identity = Identity(tenant="t", model="m", revision="r", salt="s", epoch=1)
    spaces = [identity] + [
        replace(identity, **{name: value})
        for name, value in {"tenant": "u", "model": "n", "revision": "q", "salt": "", "epoch": 2}.items()
    ]
    digests = {space.namespace(LAYOUT, "vllm", tp_size=2).digest for space in spaces}
    digests.add(identity.namespace(LAYOUT, "vllm", tp_size=2, tp_rank=1).digest)
    digests.add(identity.namespace(LAYOUT, "sglang", tp_size=2).digest)
    assert len(digests) == 8


def test_a_checkpoint_is_named_by_its_bytes_not_its_place(tmp_path: Path) -> None:
    first = tmp_path / "here" / "llama"
    first.mkdir(parents=True)
    (first / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(b"weights" * 1000)
    copy = tmp_path / "there" / "llama"
    shutil.copytree(first, copy)
    assert named(Identity(), str(first)) == named(Identity(), str(copy))
    changed = tmp_path / "changed" / "llama"
    shutil.copytree(first, changed)
    (changed / "model.safetensors").write_bytes(b"weights" * 999 + b"weightz")
    assert named(Identity(), str(changed)).model == "llama"
    assert named(Identity(), str(changed)).revision != named(Identity(), str(first)).revision
    assert named(Identity(model="mine", revision="7"), str(first)) == Identity(model="mine", revision="7")


def test_a_checkpoint_of_a_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--meta--Llama" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert named(Identity(), str(snapshot)) == Identity(model="meta/Llama", revision=commit)
    assert named(Identity(), "meta/Llama", "main") == Identity(model="meta/Llama", revision="main")


def test_a_directory_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no weights; name them with the options model and revision"):
        named(Identity(), str(tmp_path))
