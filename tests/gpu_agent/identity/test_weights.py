"""Weights are identified by a commit or by all their bytes.

Where neither is available, the start fails and names the remedy.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_others
import on_sglang
import on_vllm
import pytest

from gpu_agent.identity import checkpoint
from gpu_agent.identity.checkpoint import named, process_start, secondary_weights
from gpu_agent.options import Identity
from kvstore import ConfigError

COMMIT, NEXT = (
    "0123456789abcdef0123456789abcdef01234567",
    "89abcdef0123456789abcdef0123456789abcdef",
)
Names = Callable[..., Any]
# Adapters that know where an engine loads its weights from (`where`) and their revision.
TOLD: dict[str, Names] = {
    "vLLM connector": lambda tmp_path, where, revision=None: on_vllm.connector(
        tmp_path, {"model_config.model": where, "model_config.revision": revision}
    ),
    "vLLM tier": lambda tmp_path, where, revision=None: on_vllm.tier(
        tmp_path, {"model_config.model": where, "model_config.revision": revision}
    ),
    "SGLang HiCache": lambda tmp_path, where, revision=None: on_sglang.hicache(
        tmp_path, {"args.model_path": where, "args.revision": revision}
    ),
    "SGLang linker": lambda tmp_path, where, revision=None: on_sglang.linker(
        tmp_path, {"args.model_path": where, "args.revision": revision}
    ),
    "LightLLM": lambda tmp_path, where, revision=None: on_others.lightllm(
        tmp_path, {"arguments": {"model_dir": where}}
    ),
}
adapters = pytest.mark.parametrize("adapter", TOLD.values(), ids=TOLD)


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set and return the user's hub cache, which is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fetched(
    cache: Path, commit: str = COMMIT, name: str = "org/tiny", revision: str = "main"
) -> Path:
    """Make a repository as the hub's client stores it, and return its snapshot.

    Small files are named by git's hash, large ones by their SHA-256.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    os.utime(repository / "refs" / revision, (0, 0))  # long ago
    config, weights = b'{"model_type": "llama"}', b"weights of " + commit.encode()
    blobs = {
        "config.json": (hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest(), config),
        "model.safetensors": (hashlib.sha256(weights).hexdigest(), weights),
    }
    for file, (blob, content) in blobs.items():
        (repository / "blobs" / blob).write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{blob}")
    return snapshot


def directory(path: Path, weights: bytes = b"weights" * 1000) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def revision_of(path: Path) -> str:
    return named(Identity(), str(path)).revision


# ---- hub names ------------------------------------------------------------------------------


@adapters
def test_hub_name_without_a_revision_resolves_to_the_cached_commit(
    adapter: Names, tmp_path: Path, hub: Path
) -> None:
    fetched(hub)
    space = adapter(tmp_path, "org/tiny")
    assert (space.model, space.revision) == ("org/tiny", COMMIT)
    fetched(hub, NEXT)
    assert adapter(tmp_path, "org/tiny").revision == NEXT


@adapters
@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_unknown_weights_fail_the_start_and_name_the_remedy(
    adapter: Names, tmp_path: Path, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"the weights of 'org/tiny' are unknown: .* set the option revision"
    ):
        adapter(tmp_path, "org/tiny", revision)
    monkeypatch.setenv("KVSTORE_REVISION", "by hand")
    assert adapter(tmp_path, "org/tiny", revision).revision == "by hand"


def test_branch_resolves_to_its_commit(hub: Path) -> None:
    fetched(hub, revision="v1.0")
    assert named(Identity(), "org/tiny", "v1.0") == Identity(model="org/tiny", revision=COMMIT)
    assert named(Identity(), "org/elsewhere", NEXT).revision == NEXT
    with pytest.raises(ConfigError, match="revision 'main'"):
        named(Identity(), "org/tiny")


def test_branch_moved_during_the_start_fails_the_start(hub: Path) -> None:
    """The engine may have loaded either commit.

    If the cache holds only one commit, the engine has loaded that one.
    """
    fetched(hub)
    ref = hub / "models--org--tiny" / "refs" / "main"
    os.utime(ref)
    assert named(Identity(), "org/tiny").revision == COMMIT
    fetched(hub, NEXT)
    assert named(Identity(), "org/tiny").revision == NEXT
    os.utime(ref)
    with pytest.raises(
        ConfigError, match=r"another commit .* start it again, or set the option revision"
    ):
        named(Identity(), "org/tiny")
    assert named(Identity(revision="mine"), "org/tiny").revision == "mine"
    assert 0 < time.time() - process_start() < 86400


def test_commit_without_a_snapshot_is_unknown(hub: Path) -> None:
    shutil.rmtree(fetched(hub))
    with pytest.raises(ConfigError, match="holds no commit"):
        named(Identity(), "org/tiny")


def test_weights_are_searched_in_the_engines_cache(tmp_path: Path, hub: Path) -> None:
    """With --download-dir another cache must not be read, since it may hold another commit.

    Names of another hub mean other repositories.
    """
    fetched(hub)
    fetched(tmp_path / "downloads", NEXT)
    downloads = str(tmp_path / "downloads")
    space = on_vllm.connector(
        tmp_path, {"load_config.download_dir": downloads, "model_config.model": "org/tiny"}
    )
    assert space.revision == NEXT
    space = on_sglang.hicache(
        tmp_path, {"args.download_dir": downloads, "args.model_path": "org/tiny"}
    )
    assert space.revision == NEXT
    with pytest.raises(ConfigError, match="no hub's name"):
        named(Identity(), "org/tiny", cache=None)


def test_hub_cache_directory_equals_the_hub_clients(tmp_path: Path) -> None:
    usual = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "XDG_"))
    }
    code = """
import ast, importlib, os, sys
from huggingface_hub import constants
from kvstore.config import hub_cache_dir
usual = dict(os.environ)
for variables in ast.literal_eval(sys.argv[1]):
    os.environ.clear()
    os.environ.update(usual | variables)
    print(importlib.reload(constants).HF_HUB_CACHE, hub_cache_dir())
"""
    variables = (
        {"XDG_CACHE_HOME": str(tmp_path)},
        {"HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path)},
        {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)},
    )
    command = [sys.executable, "-c", code, repr(variables)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=usual)
    directories = [line.split() for line in done.stdout.splitlines()]
    assert len({theirs for theirs, _ in directories}) == len(variables)
    assert [ours for _, ours in directories] == [theirs for theirs, _ in directories]


# ---- hub snapshots --------------------------------------------------------------------------


def test_snapshot_is_identified_by_its_commit(hub: Path) -> None:
    snapshot = fetched(hub)
    assert named(Identity(), str(snapshot)) == Identity(model="org/tiny", revision=COMMIT)
    assert named(Identity(), f"{snapshot}/") == Identity(model="org/tiny", revision=COMMIT)
    (hub / "link").symlink_to(snapshot)
    assert named(Identity(), str(hub / "link")) == Identity(model="org/tiny", revision=COMMIT)
    file = named(Identity(), str(snapshot / "model.safetensors"))
    assert file == Identity(model="org/tiny/model.safetensors", revision=COMMIT)


def _edited(snapshot: Path) -> None:
    # Writes through the link.
    (snapshot / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}')


def _replaced(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"my own")


def _added(snapshot: Path) -> None:
    (snapshot / "adapter.bin").write_bytes(b"my own")


@pytest.mark.parametrize("change", [_edited, _replaced, _added])
def test_modified_snapshot_is_not_identified_by_its_commit(
    hub: Path, change: Callable[[Path], None]
) -> None:
    snapshot = fetched(hub)
    change(snapshot)
    assert revision_of(snapshot).startswith("weights=")


# ---- files and directories ------------------------------------------------------------------


@adapters
def test_single_weight_file_is_identified_by_its_content(adapter: Names, tmp_path: Path) -> None:
    """Quantized again, the file may keep its name, length and modification time."""
    file = tmp_path / "tiny-Q4.gguf"
    file.write_bytes(b"quantised once")
    before, stat = adapter(tmp_path, str(file)), file.stat()
    assert before.model == "tiny-Q4.gguf"
    assert adapter(tmp_path, str(file)) == before
    file.write_bytes(b"quantised anew")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert adapter(tmp_path, str(file)).digest != before.digest
    moved = directory(tmp_path / "elsewhere") / "tiny-Q4.gguf"
    moved.write_bytes(b"quantised once")
    assert adapter(tmp_path, str(moved)) == before


def test_all_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    parts = [tmp_path / f"tiny-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"weights")
    (tmp_path / "tiny-00001-of-00003.gguf").write_bytes(b"of another")
    before = revision_of(parts[0])
    parts[1].write_bytes(b"others!")
    assert revision_of(parts[0]) != before


def test_checkpoint_is_identified_by_its_bytes_not_its_path(tmp_path: Path) -> None:
    first = directory(tmp_path / "here" / "llama")
    copy, changed = tmp_path / "there" / "llama", tmp_path / "changed" / "llama"
    shutil.copytree(first, copy)
    assert named(Identity(), str(first)) == named(Identity(), str(copy))
    shutil.copytree(first, changed)
    (changed / "model.safetensors").write_bytes(b"weights" * 999 + b"weightz")
    assert named(Identity(), str(changed)).model == "llama"
    assert revision_of(changed) != revision_of(first)
    assert named(Identity(model="mine", revision="7"), str(first)) == Identity(
        model="mine", revision="7"
    )


def test_checkpoint_replaced_within_a_process_changes_the_revision(tmp_path: Path) -> None:
    first = directory(tmp_path / "llama", b"weights 1")
    before = revision_of(first)
    (first / "model.safetensors").write_bytes(b"weights 2")
    assert revision_of(first) != before


@pytest.mark.parametrize(
    "name", ["shard.unheard-of", "modeling_tiny.py", "weights/part-1.safetensors", "vocab.txt"]
)
def test_all_relevant_files_change_the_revision(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path / "llama")
    file = path / name
    file.parent.mkdir(exist_ok=True)
    found = {revision_of(path)}
    for content in (b"1", b"2"):
        file.write_bytes(content)
        found.add(revision_of(path))
    assert len(found) == 3


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", ".cache/lock.bin", "plot.png"])
def test_irrelevant_files_do_not_change_the_revision(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path / "llama")
    before = revision_of(path)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"noise")
    assert revision_of(path) == before


def test_links_are_followed_once(tmp_path: Path) -> None:
    path, elsewhere = directory(tmp_path / "llama"), directory(tmp_path / "elsewhere")
    (path / "more").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(path)
    before = revision_of(path)
    (elsewhere / "model.safetensors").write_bytes(b"others")
    assert revision_of(path) != before


def test_directory_without_weights_names_the_remedy(tmp_path: Path) -> None:
    """Engines make such a directory for the configuration of weights streamed from elsewhere."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no weights; name them with the option revision"):
        named(Identity(), str(tmp_path))


def test_unreadable_or_changing_weights_fail_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(tmp_path / "llama")

    def unreadable(*_: Any) -> str:
        raise PermissionError(13, "Permission denied", "model.safetensors")

    def replaced(*_: Any) -> str:
        (path / "model.safetensors").write_bytes(b"a download that goes on")
        return "weights=00"

    for reads, message in (
        (unreadable, r"can not be read.*model\.safetensors"),
        (replaced, "changed while they were"),
    ):
        monkeypatch.setattr(checkpoint, "_digest", reads)
        with pytest.raises(ConfigError, match=message):
            named(Identity(), str(path))


@adapters
def test_hub_revision_is_ignored_for_a_directory(adapter: Names, tmp_path: Path) -> None:
    path = directory(tmp_path / "llama")
    assert adapter(tmp_path, str(path), "main").revision == revision_of(path)


def test_slow_reading_of_weights_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SLOW_NBYTES", 1000)
    named(Identity(), str(directory(tmp_path / "llama")))
    assert [
        (record.levelno, "the option revision" in record.message) for record in caplog.records
    ] == [(logging.WARNING, True)]


# ---- draft weights --------------------------------------------------------------------------


def test_draft_is_identified_like_a_model_or_by_revision(tmp_path: Path, hub: Path) -> None:
    fetched(hub)
    assert secondary_weights(False, "org/tiny") == f"org/tiny@{COMMIT}"
    one, two = (
        secondary_weights(True, str(directory(tmp_path / place / "eagle", place.encode())))
        for place in "ab"
    )
    assert one != two
    with pytest.raises(ConfigError, match="org/eagle"):
        secondary_weights(False, "org/eagle", "v1")
    assert secondary_weights(True, "org/eagle", "v1") == "org/eagle@v1"
