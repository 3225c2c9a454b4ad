"""Measure how the code is laid out: sizes of files and functions, docstrings, prose and options.

    python benchmarks/layout.py [ROOT] [--json]

Only Python files of the three packages count; tests and generated stubs (`pb/`) do not. Each row
has its aim beside it. How the less obvious rows are counted:

fragments   Docstrings of functions and methods whose first word no imperative starts with: an
            article, pronoun, preposition, quantifier, conjunction or question word ("Of a page",
            "Whether", "The"). It is a closed list of words, so it is simple and repeatable, but
            not exact. A noun at the start ("Pages of ...") is missed. A full sentence that starts
            with "The" is counted. Docstrings of modules and classes may name a thing: they are
            left out.
Protocols   Classes that inherit from `typing.Protocol` directly. An implementation is a class of
            the packages that inherits from the Protocol or has all of its members, itself or by
            a base class of the packages. A Protocol without members is not counted, nor one that
            no class here implements: it describes an engine's object.
options     Lines of `kvstore-node --help` that start with an option, but for --help and --version,
            which set nothing.
"""

import argparse
import ast
import functools
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("kvstore", "node", "gpu_agent")
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
SENTENCE_WORDS_MAX = 35
WORDS = """
a an the this that these those it its they their them he his him she her we our us you your i my
one ones somebody someone anybody anyone everybody everyone nobody none nothing something
anything everything other others another
all any both each either every few many more most much neither no not only same several some such
what which who whom whose when where whether why how
about above across after against along among around as at away back before behind below beneath
beside besides between beyond by down during except for from in inside into like near of off on
once onto out outside over past per since than through throughout till to toward towards under
until up upon via with within without
and but or nor so yet because if unless while although though however
two three four here there now then never always also just even as-is
"""
NO_IMPERATIVE = frozenset(re.findall(r"\S+", WORDS))


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def line_count(self) -> int:
        """Return the number of lines."""
        return len(self.text.splitlines())


@dataclass(frozen=True)
class Row:
    """A line of the table: what was counted and what it should be."""

    name: str
    value: str
    aim: str


def sources(root: Path) -> list[Source]:
    """Parse the files of the packages that are written by hand."""
    paths = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    texts = ((path, path.read_text()) for path in paths if path.parent.name != "pb")
    return [Source(path, text, ast.parse(text)) for path, text in texts]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(found: list[Source]) -> Iterator[Function]:
    """Yield every function and method, nested ones included."""
    for source in found:
        for node in nodes(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file; walking a tree takes longer than parsing it."""
    return list(ast.walk(tree))


def long_functions(found: list[Source]) -> int:
    """Count the functions of more than 70 lines, decorators left out."""
    ends = ((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions(found))
    return sum(count > FUNCTION_LINES_MAX for count in ends)


def is_fragment(docstring: str) -> bool:
    """Tell whether no imperative starts with the first word."""
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", docstring)
    return not words or words[0].lower() in NO_IMPERATIVE


def fragments(found: list[Source]) -> tuple[int, int]:
    """Count the docstrings of functions that are fragments, and all of them."""
    texts = [text for node in functions(found) if (text := ast.get_docstring(node))]
    return sum(map(is_fragment, texts)), len(texts)


def wide_lines(found: list[Source]) -> tuple[int, int]:
    """Count the lines that are wider than 100 columns, and all lines."""
    lines = [line for source in found for line in source.text.splitlines()]
    return sum(len(line) > LINE_COLUMNS_MAX for line in lines), len(lines)


def fullest_folder(found: list[Source], root: Path) -> tuple[int, str]:
    """Return the most files of one folder, and the folder."""
    counts = Counter(source.path.parent.relative_to(root) for source in found)
    folder, count = counts.most_common(1)[0]
    return count, folder.as_posix()


def words_of(path: Path) -> int:
    """Count the words of a document, as `wc -w` does."""
    return len(path.read_text().split()) if path.exists() else 0


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text: of its paragraphs, list items and table cells."""
    units: list[str] = [""]
    for line in text.splitlines():
        if not line.strip() or line.startswith(("    ", "#")):
            units.append("")
        elif line.startswith("|"):
            units += [*re.split(r"(?<!\\)\|", line)[1:-1], ""]
        elif re.match(r"\s*([*-]|\d+\.) ", line):
            units.append(line)
        else:
            units[-1] += f" {line}"
    plain = (re.sub(r"\]\([^)]*\)", "]", unit) for unit in units)
    found = [part for unit in plain for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[(])", unit)]
    return [sentence for sentence in found if sentence.strip()]


def documents(root: Path) -> list[Path]:
    """Return README.md and docs/, without decisions."""
    found = (root / "docs").rglob("*.md")
    return [root / "README.md", *(path for path in found if "decisions" not in path.parts)]


@functools.cache
def members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's methods and fields, and of what its methods assign."""
    found: set[str] = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
            found |= {
                n.attr
                for n in ast.walk(part)
                if isinstance(n, ast.Attribute)
                and isinstance(n.ctx, ast.Store)
                and isinstance(n.value, ast.Name)
                and n.value.id == "self"
            }
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign):
            found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    return found


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the last part of each base class's name: `Wire` of `wires.Wire[Any]`."""
    texts = (ast.unparse(base).partition("[")[0] for base in node.bases)
    return [text.rpartition(".")[2] for text in texts]


def lonely_protocols(found: list[Source]) -> tuple[list[str], int]:
    """Return the Protocols with one implementation, and the count of all Protocols."""
    classes = [n for s in found for n in nodes(s.tree) if isinstance(n, ast.ClassDef)]
    by_name = {node.name: node for node in classes}

    def everything(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        bases = [b for b in base_names(node) if b in by_name and b != "Protocol" and b not in seen]
        inherited = (everything(by_name[base], seen | {node.name}) for base in bases)
        return members(node).union(*inherited)

    protocols = [node for node in classes if "Protocol" in base_names(node) and everything(node)]
    concrete = [node for node in classes if "Protocol" not in base_names(node)]
    lonely = []
    for protocol in protocols:
        wanted = everything(protocol)
        count = sum(
            protocol.name in base_names(node) or wanted <= everything(node) for node in concrete
        )
        if count == 1:
            lonely.append(protocol.name)
    return sorted(lonely), len(protocols)


def option_count(root: Path) -> int | None:
    """Count the settings in the help of a node; None where it does not start."""
    if not (root / "node" / "main.py").exists():
        return None
    command = [sys.executable, "-m", "node.main", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = re.findall(r"^\s+-[\w-]+(?:, --[\w-]+)?", done.stdout, re.MULTILINE)
    return (
        sum(not option.endswith(("--help", "--version")) for option in found)
        if done.returncode == 0
        else None
    )


def share(part: int, whole: int) -> str:
    """Format a share in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def measure(root: Path) -> list[Row]:
    """Measure a tree."""
    found = sources(root)
    lines = [source.line_count for source in found]
    broken, docstrings = fragments(found)
    wide, all_lines = wide_lines(found)
    most, folder = fullest_folder(found, root)
    lonely, protocols = lonely_protocols(found)
    options = option_count(root)
    prose = [part for path in documents(root) for part in sentences(path.read_text())]
    long = sum(len(part.split()) > SENTENCE_WORDS_MAX for part in prose)
    return [
        Row("files · lines", f"{len(found)} · {sum(lines):,}", "≤ 250 · fewer"),
        Row(
            "median · largest file", f"{statistics.median(lines):g} · {max(lines)}", "~170 · ≤ 600"
        ),
        Row("functions over 70 lines", str(long_functions(found)), "0"),
        Row("fragments", f"{broken} of {docstrings}, {share(broken, docstrings)}", "< 3 %"),
        Row("lines over 100 characters", f"{wide}, {share(wide, all_lines)}", "0"),
        Row("most files of one folder", f"{most} ({folder})", "≤ 22"),
        Row("words of documents", f"{sum(map(words_of, documents(root))):,}", "≤ 40,000"),
        Row("sentences over 35 words", share(long, len(prose)), "< 2 %"),
        Row("README words", f"{words_of(root / 'README.md'):,}", "≤ 700"),
        Row("Protocols with one implementation", f"{len(lonely)} of {protocols}", "0"),
        Row("options of a node", "-" if options is None else str(options), "≤ 40"),
    ]


def main(words: list[str] | None = None) -> None:
    """Print the table of a tree, or with --json its rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    rows = measure(given.root)
    if given.json:
        print(json.dumps({row.name: {"now": row.value, "aim": row.aim} for row in rows}, indent=2))
        return
    print("| | now | aim |\n| --- | --: | --: |")
    for row in rows:
        print(f"| {row.name} | {row.value} | {row.aim} |")


if __name__ == "__main__":
    main()
