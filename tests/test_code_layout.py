"""Tests of benchmarks/layout.py: it counts a small tree correctly and runs on this repository."""

import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "layout.py"
PROTOCOLS = '''
"""Names a thing: not counted."""
from typing import Protocol

class Wire(Protocol):
    def send(self) -> None: ...

class Lonely(Protocol):
    def fly(self) -> None: ...

class Tcp:
    def send(self) -> None:
        """Send the bytes."""

class Shm(Tcp):
    def fly(self) -> None:
        """Whether it flies."""
'''


@pytest.fixture(scope="module")
def layout() -> Iterator[ModuleType]:
    """Import the script by path, because benchmarks/ is not a package."""
    spec = importlib.util.spec_from_file_location("code_layout", SCRIPT)
    assert spec
    assert spec.loader
    module = sys.modules["code_layout"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["code_layout"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a tree with three counted files, a generated file and a test file."""
    body = "\n".join(f"    x{i} = {i}" for i in range(70))
    files = {
        "kvstore/transports/wire.py": PROTOCOLS.lstrip(),
        "kvstore/transports/long.py": f"def long() -> None:\n{body}\n",
        "node/wide.py": f'def wide() -> str:\n    return "{"x" * 100}"\n',
        "node/pb/generated.py": "x = 1\n" * 1000,
        "tests/test_wide.py": "y = 1\n" * 1000,
        "README.md": "three short words\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_layout_of_a_small_tree_is_counted_exactly(layout: ModuleType, tree: Path) -> None:
    lines = len(PROTOCOLS.lstrip().splitlines())
    assert {row.name: row.value for row in layout.measure(tree)} == {
        "files · lines": f"3 · {lines + 71 + 2}",
        "median · largest file": f"{lines} · 71",
        "functions over 70 lines": "1",
        "fragments": "1 of 2, 50.0 %",
        "lines over 100 characters": f"1, {100 / (lines + 73):.1f} %",
        "most files of one folder": "2 (kvstore/transports)",
        "words of documents": "3",
        "sentences over 35 words": "0.0 %",
        "README words": "3",
        "Protocols with one implementation": "1 of 2",
        "options of a node": "-",
    }


@pytest.mark.parametrize(
    ("docstring", "fragment"),
    [
        ("Return the limit.", False),
        ("Of who is not known yet: a hello.", True),
        ("Whether it is there.", True),
        ("`keys`: send them.", False),
        ("The caller holds the lock.", True),
        ("...", True),
    ],
)
def test_first_word_decides_whether_a_docstring_is_a_fragment(
    layout: ModuleType, docstring: str, fragment: bool
) -> None:
    assert layout.is_fragment(docstring) is fragment


def test_documents_have_few_words(layout: ModuleType) -> None:
    assert sum(map(layout.words_of, layout.documents(ROOT))) <= 40_000


@pytest.mark.long
def test_layout_of_this_tree_has_a_figure_in_each_row(
    layout: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measuring takes seconds, and the script runs twice below
    monkeypatch.setattr(layout, "measure", functools.cache(layout.measure))
    layout.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert all(row["now"] != "-" for row in rows.values())
    assert int(rows["options of a node"]["now"]) > 20
    layout.main([])
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2
