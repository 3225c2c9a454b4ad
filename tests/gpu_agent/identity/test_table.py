"""Check every cell of the table in docs/identity.md against the code; none may be missing."""

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import on_others
import on_sglang
import on_transformers
import on_vllm
import pytest
from claims import Adapter

from kvstore.errors import ConfigError, InvalidRequest

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "identity.md"
ADAPTERS: dict[str, Adapter] = {
    **on_vllm.ADAPTERS,
    **on_sglang.ADAPTERS,
    **on_others.ADAPTERS,
    **on_transformers.ADAPTERS,
}
USUAL: dict[int, bytes] = {}  # digests by the id of the adapter
WORDS = {"namespace", "hash", "refused", "no", "unprotected"}


def cells() -> dict[tuple[str, str], str]:
    """Return the cells of the table by (adapter, ingredient)."""
    lines = itertools.dropwhile(
        lambda line: not line.startswith("| ingredient"), DOCUMENT.read_text().splitlines()
    )
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    head, _, *body = ([cell.strip() for cell in row.strip("| ").split("|")] for row in rows)
    return {
        (adapter, row[0]): cell
        for row in body
        for adapter, cell in zip(head[1:], row[1:], strict=True)
    }


def table() -> dict[tuple[str, str], set[str]]:
    """Return the words of each cell by (adapter, ingredient), without the numbers of notes."""
    return {
        pair: set(re.sub(r"\(\d+\)", "", cell).replace(",", " ").split())
        for pair, cell in cells().items()
    }


def tried() -> dict[tuple[str, str], set[str]]:
    return {
        (name, ingredient): set(words)
        for name, adapter in ADAPTERS.items()
        for ingredient, words in adapter.claims.items()
    }


def test_table_equals_the_tested_claims() -> None:
    assert table() == tried()
    assert set().union(*table().values()) <= WORDS


def ways() -> Iterator[Any]:
    for name, adapter in ADAPTERS.items():
        for ingredient, words in adapter.claims.items():
            for word, claim in words.items():
                for number, way in enumerate(claim if isinstance(claim, list) else ()):
                    yield pytest.param(
                        adapter, word, way, id=f"{name}-{ingredient}-{word}-{number}"
                    )


@pytest.mark.parametrize(("adapter", "word", "way"), list(ways()))
def test_identity_table_cells_hold(
    adapter: Adapter,
    word: str,
    way: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # an empty cache
    usual = USUAL.get(id(adapter)) or USUAL.setdefault(
        id(adapter), adapter.namespace(tmp_path, {}).digest
    )
    if "unlike" in way:
        usual = adapter.namespace(tmp_path, way["unlike"]).digest
    if word == "refused":
        with pytest.raises((ConfigError, InvalidRequest)) as refusal:
            adapter.namespace(tmp_path, way)
        assert len(str(refusal.value).split()) > 8, "the refusal names no reason or remedy"
    elif word == "namespace":
        assert adapter.namespace(tmp_path, way).digest != usual
    else:
        assert adapter.namespace(tmp_path, way).digest == usual


def test_same_configuration_gives_the_same_namespace(tmp_path: Path) -> None:
    """Without this, the differences tested above would prove nothing.

    The folder must not matter, since the usual digest is computed once for all tests.
    """
    (tmp_path / "other").mkdir()
    for adapter in ADAPTERS.values():
        once, again = (adapter.namespace(tmp_path, {}).digest for _ in range(2))
        assert once == again == adapter.namespace(tmp_path / "other", {}).digest


def references() -> Iterator[Any]:
    for name, adapter in ADAPTERS.items():
        for ingredient, words in adapter.claims.items():
            for claim in words.values():
                if isinstance(claim, str):
                    yield pytest.param(claim, id=f"{name}-{ingredient}")


@functools.cache
def functions(file: Path) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


@pytest.mark.parametrize("reference", list(references()))
def test_claim_about_engine_code_names_an_existing_test(reference: str) -> None:
    file, _, name = reference.partition("::")
    assert name in functions(ROOT / file)


@pytest.mark.parametrize("read", [table, tried])
def test_all_pairs_of_adapter_and_ingredient_are_covered(
    read: Callable[[], dict[tuple[str, str], set[str]]],
) -> None:
    found = read()
    ingredients = {ingredient for _, ingredient in found}
    assert len(ingredients) == 13
    assert found.keys() == {
        (adapter, ingredient) for adapter in ADAPTERS for ingredient in ingredients
    }
    assert all(found.values())
