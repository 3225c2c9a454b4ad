"""All names in golden/names still exist, with compatible parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
from broken import broken
from surface import ADAPTERS, LISTS, python

NAMES = Path(__file__).parents[1] / "golden" / "names"


@pytest.mark.parametrize("name", LISTS)
def test_stable_names_exist(name: str) -> None:
    """No stable name has changed incompatibly.

    Each difference breaks some user's program, script, manifest or dashboard; docs/upgrading.md
    says what such a change needs. `make golden` records new names.
    """
    assert broken(json.loads((NAMES / f"{name}.json").read_text()), LISTS[name]()) == []


def test_every_documented_adapter_exists() -> None:
    found = python()
    assert [
        f
        for f, names in ADAPTERS.items()
        for n in names
        if f"gpu_agent.engines.{f}.{n}" not in found
    ] == []


CALL = {
    "parameters": {
        "pages": {"place": 0, "optional": False},
        "ttl_s": {"place": 1, "optional": True},
    }
}


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"gone": True}, ["/put/parameters/ttl_s: is gone"]),
        (
            {"ttl_s": {"place": 1, "optional": False}},
            ["/put/parameters/ttl_s/optional: was True, is False"],
        ),
        ({"ttl_s": {"place": 2, "optional": True}}, ["/put/parameters/ttl_s/place: was 1, is 2"]),
        ({"pages": {"place": 0, "optional": True}}, []),
        ({"ack": {"place": 2, "optional": True}}, []),
        ({"ack": {"place": 2, "optional": False}}, ["/put/parameters/ack: must be given now"]),
    ],
)
def test_incompatible_parameters_are_reported(
    change: dict[str, Any], differences: list[str]
) -> None:
    now = {
        **CALL["parameters"],
        **{name: about for name, about in change.items() if name != "gone"},
    }
    if "gone" in change:
        now.pop("ttl_s")
    assert broken({"put": CALL}, {"put": {"parameters": now}}) == differences


@pytest.mark.parametrize(
    ("was", "now", "kept"),
    [
        ({"low": 1, "high": 9}, {"low": 0, "high": 10}, True),
        ({"low": 1, "high": 9}, {"low": None, "high": None}, True),
        ({"low": 1, "high": 9}, {"low": 2, "high": 9}, False),
        ({"low": None, "high": None}, {"low": None, "high": 5}, False),
        ({"choices": {"a": True}}, {"choices": {"a": True, "b": True}}, True),
        ({"choices": {"a": True}}, {"choices": {}}, False),
        ({"choices": {}}, {"choices": {"a": True}}, False),
        ({"choices": {}}, {"choices": {}}, True),
        ({"1": "uint32 code"}, {"1": "uint64 code"}, False),
    ],
)
def test_stable_names_may_grow(was: Any, now: Any, kept: bool) -> None:
    assert (broken(was, now) == []) == kept
