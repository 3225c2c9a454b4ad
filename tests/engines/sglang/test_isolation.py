"""R1, R2, R3: engines that differ in anything that affects a page's bytes never share pages."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import PAGE, Engine, fill, indexer_transfer, mamba, mha, mla, parallel
from sglang.srt.mem_cache.hicache_storage import PoolName

import gpu_agent.engines.sglang_weights as adapter
from kvstore.errors import ConfigError

Make = Callable[..., Any]
TOKENS = list(range(8 * PAGE))
SLOTS = torch.arange(len(TOKENS))


def stored(engine: Any) -> None:
    fill(engine.host)
    assert engine.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)


def hits(engine: Any) -> int:
    return engine.query(TOKENS).storage_hit_count // engine.page


def test_identical_engine_hits(engine: Make) -> None:
    """Without this hit, the misses tested below would prove nothing."""
    stored(engine(mha()))
    assert hits(engine(mha())) == 8


@pytest.mark.parametrize(
    "options",
    [{"model": "other"}, {"revision": "2"}, {"tenant": "team-b"}, {"salt": "lora-1"}, {"epoch": 1}],
    ids=lambda options: next(iter(options)),
)
def test_other_options_miss(engine: Make, options: dict[str, Any]) -> None:
    stored(engine(mha()))
    assert hits(engine(mha(), **options)) == 0


@pytest.mark.parametrize(
    "other",
    {
        "layer_first": lambda: mha("layer_first"),
        "page_first_direct": lambda: mha("page_first_direct"),
        "page_head": lambda: mha("page_head"),
        "float16": lambda: mha(dtype=torch.float16),
        "fp8": lambda: mha(dtype=torch.float8_e4m3fn),
        "heads": lambda: mha(heads=2, dim=64),
        "layers": lambda: mha(layers=2, heads=8),
        "layer range": lambda: mha(first_layer=4),
        "latents": mla,
    }.items(),
    ids=lambda item: item[0],
)
def test_other_pools_miss(engine: Make, other: tuple[str, Callable[[], Any]]) -> None:
    stored(engine(mha()))
    assert hits(engine(other[1]())) == 0


def test_layouts_of_equal_shape_miss(engine: Make) -> None:
    """With as many layers as heads, page_first_direct and page_head pages have equal shapes."""
    writer, reader = engine(mha("page_first_direct")), engine(mha("page_head"))
    assert (
        writer.backend._pages["kv"].namespace.layout == reader.backend._pages["kv"].namespace.layout
    )
    stored(writer)
    assert hits(reader) == 0


def test_page_sizes_miss(engine: Make) -> None:
    """An engine with another page size misses even if it asks for the same keys."""
    small = engine(mha(page=PAGE))
    stored(small)
    large = engine(mha(page=2 * PAGE))
    assert large.backend.batch_exists(small.hashes(TOKENS)) == 0


def test_ranks_miss_where_heads_are_split(engine: Make) -> None:
    with parallel(0, 2):
        stored(engine(mha()))
    with parallel(1, 2):
        assert hits(engine(mha())) == 0
    assert hits(engine(mha())) == 0  # a single rank
    with parallel(0, 2):
        assert hits(engine(mha())) == 8


def test_ranks_share_latents_but_not_states(engine: Make) -> None:
    def namespaces(rank: int) -> dict[str, bytes]:
        with parallel(rank, 2):
            made = engine(mla(), mamba(), mha(name=PoolName.DRAFT))
        return {name: pages.namespace.digest for name, pages in made.backend._pages.items()}

    first, second = namespaces(0), namespaces(1)
    assert first["kv"] == second["kv"]
    assert first["mamba"] != second["mamba"]
    assert first["draft"] != second["draft"]


def test_pools_of_equal_shape_have_separate_namespaces(engine: Make) -> None:
    made = engine(mha(), mha(name=PoolName.SWA))
    kv, window = (made.backend._pages[name].namespace for name in ("kv", "swa"))
    assert kv.layout == window.layout
    assert kv.digest != window.digest


# ---- a served name does not identify the weights ----------------------------------------------


def serve(monkeypatch: pytest.MonkeyPatch, path: str, **args: Any) -> None:
    """Make the adapter see a server started with these arguments."""
    defaults = {
        "model_path": path,
        "revision": None,
        "trust_remote_code": False,
        "dtype": "auto",
        "quantization": None,
        "quantization_param_path": None,
        "kv_cache_dtype": "auto",
        "json_model_override_args": "{}",
        "load_format": "auto",
        "weight_version": "default",
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
    }
    monkeypatch.setattr(adapter, "get_server_args", lambda: SimpleNamespace(**{**defaults, **args}))
    monkeypatch.setattr(adapter, "model_config", lambda _: {"model_type": "llama"})


def unnamed(config: dict[str, Any], make: Make, *pools: Any) -> Any:
    """Make an engine whose options do not name the weights."""
    config.pop("model", None), config.pop("revision", None)
    return make(*(pools or (mha(),)))


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[str]:
    """Make two checkpoints in directories of the same name."""
    paths = []
    for number in range(2):
        path = tmp_path / str(number) / "llama"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes([number]) * 1000 + str(tmp_path).encode())
        paths.append(str(path))
    return paths


def test_other_weights_under_the_same_served_name_miss(
    config: dict[str, Any], engine: Make, checkpoints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, checkpoints[0])
    stored(unnamed(config, engine))
    assert hits(unnamed(config, engine)) == 8
    serve(monkeypatch, checkpoints[1])
    assert hits(unnamed(config, engine)) == 0


@pytest.mark.parametrize(
    "args",
    [
        {"dtype": "float16"},
        {"quantization": "awq"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"load_format": "dummy"},
        {"weight_version": "2"},
    ],
    ids=lambda args: next(iter(args)),
)
def test_other_arguments_miss(
    config: dict[str, Any],
    engine: Make,
    checkpoints: list[str],
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
) -> None:
    serve(monkeypatch, checkpoints[0])
    stored(unnamed(config, engine))
    serve(monkeypatch, checkpoints[0], **args)
    assert hits(unnamed(config, engine)) == 0


def test_other_scales_miss(
    config: dict[str, Any],
    engine: Make,
    checkpoints: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    scales = tmp_path / "scales.json"
    serve(monkeypatch, checkpoints[0], quantization_param_path=str(scales))
    scales.write_text("1.0")
    stored(unnamed(config, engine))
    scales.write_text("2.0")
    assert hits(unnamed(config, engine)) == 0


def test_another_draft_model_changes_only_the_draft_pool(
    config: dict[str, Any], engine: Make, checkpoints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespaces() -> dict[str, bytes]:
        made = unnamed(config, engine, mha(), mha(name=PoolName.DRAFT))
        return {name: pages.namespace.digest for name, pages in made.backend._pages.items()}

    serve(monkeypatch, checkpoints[0], speculative_draft_model_path=checkpoints[0])
    before = namespaces()
    serve(monkeypatch, checkpoints[0], speculative_draft_model_path=checkpoints[1])
    after = namespaces()
    assert before["kv"] == after["kv"]
    assert before["draft"] != after["draft"]


def test_model_configuration_includes_command_line_overrides(
    config: dict[str, Any], engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang's code reads the configuration, including what the command line overrides.

    The override here is longrope, which must be refused: its angles depend on the longest prompt of
    a batch.
    """
    read = adapter.model_config
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 64,
    }
    factors = {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({**model, **sizes}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    serve(monkeypatch, str(tmp_path))
    monkeypatch.setattr(adapter, "model_config", read)
    unnamed(config, engine)
    override = json.dumps({"rope_scaling": {"rope_type": "longrope", **factors}})
    serve(monkeypatch, str(tmp_path), json_model_override_args=override)
    monkeypatch.setattr(adapter, "model_config", read)
    with pytest.raises(ConfigError, match="'longrope'"):
        unnamed(config, engine)


def test_unnamed_weights_fail_the_start(config: dict[str, Any], engine: Make) -> None:
    with pytest.raises(ConfigError, match='set "revision"'):
        unnamed(config, engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adress": "x"}, "unknown option 'adress'"),
        ({"wire": "rdma"}, "wire='rdma'"),
        ({"workers": 0}, "workers=0"),
        ({"timeout_per_ki_token_s": -1.0}, "timeout_per_ki_token_s=-1.0"),
    ],
)
def test_wrong_option_fails_the_start_by_name(
    engine: Make, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(mha(), **options)


def test_pages_without_a_flat_form_need_interface_v1(engine: Make) -> None:
    with pytest.raises(ConfigError, match='set "interface_v1": 1'):
        engine(mha(v_dim=16), interface_v1=0)


# ---- new weights, and clear -----------------------------------------------------------------


def test_clear_makes_old_pages_miss_and_new_ones_hit(config: dict[str, Any], engine: Make) -> None:
    one = engine(mha())
    stored(one)
    assert one.controller.clear_storage_backend()
    assert hits(one) == 0
    stored(one)
    assert hits(one) == 8
    one.detach()
    again = Engine([mha()], config)  # attached again, within the same process
    assert hits(again) == 8
    again.controller.clear_storage_backend()
    assert hits(again) == 0
    again.detach()


def test_clear_covers_every_pool(engine: Make) -> None:
    from harness import dsa

    one = engine(*dsa())
    tokens = list(range(4 * 64))
    one.backup(tokens, torch.arange(len(tokens)), [indexer_transfer()])
    assert one.query(tokens, [indexer_transfer()]).storage_hit_count == len(tokens)
    before = {name: pages.namespace.digest for name, pages in one.backend._pages.items()}
    one.controller.clear_storage_backend()
    after = {name: pages.namespace.digest for name, pages in one.backend._pages.items()}
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    assert one.query(tokens, [indexer_transfer()]).storage_hit_count == 0


def test_weight_update_with_a_version_ends_the_epoch(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: after a weight update all old pages miss.

    Saves still in progress are refused, so that old pages are not stored under the new weights.
    """
    serving = SimpleNamespace(weight_version="step-1")
    monkeypatch.setattr(adapter, "get_serving", lambda: serving)
    for v1 in (0, 1):
        one = engine(mha(), interface_v1=v1)
        stored(one)
        assert hits(one) == 8
        serving.weight_version = f"step-{2 + v1}"
        assert hits(one) == 0
        assert one.backup(TOKENS, SLOTS).completed_tokens == 0
        monkeypatch.setattr(one.backend, "_settled", 0.0)  # as if 15 seconds had passed
        stored(one)
        assert hits(one) == 8
