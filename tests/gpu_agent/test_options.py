"""Which options an adapter reads from its engine's configuration."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_agent.options import Identity, facts_text, read_options
from kvstore import ConfigError, PageLayout, environment
from kvstore.config import CLIENT_VARIABLES, variables_of
from kvstore.layout import LayerGroup, Plane

ROOT = Path(__file__).parents[2]
LAYOUT = PageLayout(16, (LayerGroup("full", (0, 1), (Plane("k", "float16", (2, 8)),)),))


def test_options_are_split_by_their_owner() -> None:
    options = read_options(
        {"address": "store:7440", "tenant": "a", "load_timeout_s": "3", "flavour": "sweet"},
        own=("flavour", "other"),
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
def test_wrong_option_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(values)


def test_misspelled_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_logged", set())
    for name in ("KVSTORE_AGENT_WORKRES", "KVSTORE_ADRESS", "KVSTORE_EPOCH", "KVSTORE_NODE_X"):
        monkeypatch.setenv(name, "1")
    read_options({})
    assert [record.getMessage() for record in caplog.records] == [
        "KVSTORE_ADRESS sets nothing; did you mean KVSTORE_ADDRESS?",
        "KVSTORE_AGENT_WORKRES sets nothing; did you mean KVSTORE_AGENT_WORKERS?",
    ]
    assert variables_of(Identity, "KVSTORE") <= CLIENT_VARIABLES


def test_facts_are_readable_and_long_ones_differ() -> None:
    assert facts_text("vllm", backend="FLASH", kv_dtype="fp8") == "vllm backend=FLASH kv_dtype=fp8"
    one, other = (facts_text("vllm", a="x" * 2000, z=z) for z in "ab")
    assert one != other
    assert max(len(one), len(other)) <= 512


def test_fact_is_not_mistaken_for_other_facts_or_a_salt() -> None:
    texts = [
        facts_text("vllm", a="x b=y", b="z"),
        facts_text("vllm", a="x", b="y b=z"),
        facts_text("vllm", a="x", b="y"),
    ]
    assert len(set(texts)) == 3
    weighed = Identity(model="m").namespace(LAYOUT, facts_text("sglang", weight_version="1 salt=a"))
    salted = Identity(model="m", salt="a").namespace(
        LAYOUT, facts_text("sglang", weight_version="1")
    )
    quoted = Identity(model="m", salt='a"').namespace(
        LAYOUT, facts_text("sglang", weight_version='"1')
    )
    assert len({weighed.digest, salted.digest, quoted.digest}) == 3


def test_namespace_covers_all_fields_of_an_identity() -> None:
    identity = Identity(tenant="t", model="m", revision="r", salt="s", epoch=1)
    spaces = [identity] + [
        replace(identity, **{name: value})
        for name, value in {
            "tenant": "u",
            "model": "n",
            "revision": "q",
            "salt": "",
            "epoch": 2,
        }.items()
    ]
    digests = {space.namespace(LAYOUT, "vllm", tp_size=2).digest for space in spaces}
    digests.add(identity.namespace(LAYOUT, "vllm", tp_size=2, tp_rank=1).digest)
    digests.add(identity.namespace(LAYOUT, "sglang", tp_size=2).digest)
    assert len(digests) == 8


def test_environment_overrides_defaults_but_not_user_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = {"workers": 1, "lookup_timeout_s": 0.3, "load_timeout_s": 0.7, "wire": "bulk"}
    for name, value in {
        "AGENT_WORKERS": "5",
        "AGENT_LOAD_TIMEOUT_S": "9",
        "ADDRESS": "store:1",
    }.items():
        monkeypatch.setenv(f"KVSTORE_{name}", value)
    options = read_options({"load_timeout_s": 0.9}, (), defaults)
    agent = options.agent
    assert (agent.workers, agent.lookup_timeout_s, agent.load_timeout_s, agent.save_timeout_s) == (
        5,
        0.3,
        0.9,
        20.0,
    )
    assert (options.client.wire, options.client.address) == ("bulk", "store:1")


ENGINES = ROOT / "gpu_agent" / "engines"


def test_adapters_pass_defaults_separately_from_user_values() -> None:
    """Regression: SGLang's adapters ignored KVSTORE_AGENT_LOAD_TIMEOUT_S for their defaults."""
    for path in ENGINES.glob("*.py"):
        for call in (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ):
            if getattr(call.func, "id", "") == "read_options":
                assert not isinstance(call.args[0], ast.Dict), path.name
