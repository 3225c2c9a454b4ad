"""Tests that the documentation matches the code.

They check flags, defaults, environment variables, command lines, links, file names and the program
of the guide.
"""

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gpu_agent.options import AgentConfig, Identity
from kvstore.cli.commands import build
from kvstore.config import ClientConfig, load
from kvstore.errors import ConfigError
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig
from node.main import EXAMPLES, _parser

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "engines").glob("*.md")),
    *sorted((ROOT / "docs" / "routers").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
COMMANDS: Any = typer.main.get_command(build())


def flag(name: str) -> str:
    return "--" + name.replace("nbytes", "bytes").replace("_", "-")


FIELDS = {flag(field.name): field for field in dataclasses.fields(NodeConfig)}


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


# ---- flags and defaults ----------------------------------------------------------------------


def test_generated_reference_is_current() -> None:
    """`make docs` would not change the generated reference."""
    command = [sys.executable, "docs/make_reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_reference_lists_every_flag_and_limits_name_no_other() -> None:
    named = set(
        re.findall(r"`(--[a-z-]+)`", (ROOT / "docs" / "reference" / "flags.md").read_text())
    )
    secrets = {name for name, field in FIELDS.items() if field.metadata.get("secret")}
    assert named >= set(FIELDS) - secrets
    limits = (ROOT / "docs" / "reference" / "limits.md").read_text()
    assert set(re.findall(r"--[a-z-]*[a-z]", limits)) - {"---"} <= set(FIELDS)


def test_derived_defaults_match_the_help() -> None:
    config = NodeConfig(ram_nbytes=4 << 30, disk_nbytes=1 << 40)
    assert config.disk_queue_nbytes == config.ram_nbytes // 4
    assert config.hand_over_queue_nbytes == config.ram_nbytes // 8
    assert (config.extent_nbytes, config.disk_extent_of_new_dir) == (64 << 20, 64 << 20)
    larger = NodeConfig(ram_nbytes=8 << 30, disk_nbytes=1 << 40)
    assert larger.disk_extent_of_new_dir == larger.extent_nbytes == 128 << 20


OPEN = {"KVSTORE_NODE_INSECURE": "true", "KVSTORE_NODE_IDENTITIES": "/there"}


def test_every_node_flag_has_an_environment_variable() -> None:
    for name, field in FIELDS.items():
        variable = "KVSTORE_NODE" + name[1:].replace("-", "_").upper()
        if isinstance(field.default, str) and not field.metadata["choices"]:
            value = "there" if field.name == "shm_trust" else "/there"  # a tenant, or a path
            # An encryption key requires a data directory
            given = OPEN | {
                "KVSTORE_NODE_DATA_DIR": "/there",
                variable: value,
            }
            assert getattr(load(NodeConfig, "KVSTORE_NODE", {}, given), field.name) == value
        else:
            with pytest.raises(ConfigError, match=f"{variable}|{field.name}"):
                load(NodeConfig, "KVSTORE_NODE", {}, {variable: "nonsense"})


def test_documented_docker_variables_match_the_compose_file() -> None:
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    composed = dict(re.findall(r"\$\{(KVSTORE_\w+):?-([^}]*)\}", compose))
    rows = re.findall(
        r"^\| (`KVSTORE_[^|]+) \| ([^|]+) \|",
        section(OPERATIONS, "Docker").split("\n### ")[0],
        re.MULTILINE,
    )
    documented: dict[str, str] = {}
    for names, defaults in rows:
        short = re.findall(r"`(\w+)`", names)
        full = [name if name.startswith("KVSTORE") else "KVSTORE_NODE" + name for name in short]
        documented |= dict(zip(full, defaults.strip().split(", "), strict=True))
    assert len(documented) == 11
    assert documented.items() <= composed.items()


def test_every_documented_variable_exists() -> None:
    known = {
        "KVSTORE_" + field.name.upper()
        for kind in (ClientConfig, Identity)
        for field in dataclasses.fields(kind)
    }
    known |= {"KVSTORE_AGENT_" + field.name.upper() for field in dataclasses.fields(AgentConfig)}
    known |= {"KVSTORE_NODE_" + field.name.upper() for field in dataclasses.fields(NodeConfig)}
    known = {name.replace("NBYTES", "BYTES") for name in known} | {"KVSTORE_CONTEXT"}
    compose = "".join(path.read_text() for path in (ROOT / "docker").glob("compose*.yaml"))
    known |= set(re.findall(r"\$\{(KVSTORE_\w+)", compose))
    for path in PAGES:
        named = set(re.findall(r"\bKVSTORE_[A-Z_]*[A-Z]\b", path.read_text()))
        assert named <= known, path.name


# ---- command lines ---------------------------------------------------------------------------


def lines() -> Iterator[str]:
    """Yield the code of the documents, and the examples in the help of commands and the node."""
    for path in PAGES:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            yield from [line] if line.startswith("    ") else re.findall(r"`([^`]+)`", line)
    for command in commands_of(COMMANDS):
        yield from (command.callback.__doc__ or "").replace("\\\n", " ").splitlines()
    yield from re.split(r"[\n;]| {4,}", EXAMPLES)


def commands_of(group: Any) -> Iterator[Any]:
    """Yield the commands of a group and of the groups in it."""
    for command in group.commands.values():
        yield from commands_of(command) if hasattr(command, "commands") else [command]


def command_lines(program: str) -> Iterator[Any]:
    parts = (part.strip() for line in lines() for part in re.split(r"[|&#>]", line))
    for text in dict.fromkeys(parts):
        if text.startswith(program + " "):
            yield pytest.param(shlex.split(text)[1:], id=text)


@pytest.mark.parametrize("words", list(command_lines("kvstore-node")))
def test_documented_node_command_line_is_valid(words: list[str]) -> None:
    load(NodeConfig, "KVSTORE_NODE", vars(_parser().parse_args(words)), {})


@pytest.mark.parametrize("words", list(command_lines("kvstore")))
def test_documented_cli_command_line_is_valid(words: list[str]) -> None:
    command, arguments, context = COMMANDS, words, None
    while hasattr(command, "commands") and arguments and "--help" not in arguments:
        context = command.make_context(command.name, arguments, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]  # by click's version
        _, command, arguments = command.resolve_command(context, rest)
    if arguments and "--help" not in arguments:  # otherwise the document mentions the command
        command.make_context(command.name, arguments, parent=context)


def test_command_lines_are_found_in_the_documents() -> None:
    assert len(list(command_lines("kvstore-node"))) > 5
    assert {line.values[0][0] for line in command_lines("kvstore")} >= set(COMMANDS.commands)
    for wrong in (["cluster", "forget", "n3"], ["tenants", "quota", "team-a", "--rams", "1GiB"]):
        with pytest.raises(Exception, match=r"No such (command|option)"):
            test_documented_cli_command_line_is_valid(wrong)


# ---- links -----------------------------------------------------------------------------------

LINKING = [
    path
    for top in (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "examples")
    for path in (top.glob("*.md") if top in (ROOT, ROOT / "benchmarks") else top.rglob("*.md"))
    if "node_modules" not in path.parts
]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_in_document_resolve(document: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if ":" in name or (path.exists() and (not anchor or anchor in anchors(path.read_text()))):
            continue
        dead.append(target)
    assert dead == []


# ---- files -----------------------------------------------------------------------------------

TOPS = (
    "benchmarks",
    "deploy",
    "docker",
    "docs",
    "examples",
    "gpu_agent",
    "kvstore",
    "node",
    "proto",
    "tests",
)
FILES = {path.name for path in ROOT.iterdir() if path.is_file()} | {
    path.relative_to(ROOT).as_posix()
    for top in TOPS
    for path in (ROOT / top).rglob("*")
    if path.is_file() and path.suffix != ".pyc"
}
FOLDERS = {parent.as_posix() for name in FILES for parent in Path(name).parents}
MADE = {"member.json", "plan.html", "config.json", "dist/sbom.json"}  # by nodes, commands and users
# Without decisions and the changelog, which name files that no longer exist.
NAMING = [path for path in LINKING if "decisions" not in path.parts and path.name != "CHANGELOG.md"]
SUFFIXES = "py|pyi|cu|js|mjs|html|css|svg|json|yaml|toml|md"


def named_files(text: str) -> set[str]:
    """Return the file names in code marks, except scripts that a document cites at a commit."""
    return set(re.findall(rf"`([\w./-]+\.(?:{SUFFIXES}))`(?!\s+at\s+commit)", text))


def is_file(name: str) -> bool:
    """Return whether a file has this path, or a path that ends with it."""
    return name in FILES or any(path.endswith("/" + name) for path in FILES)


def is_module(name: str) -> bool:
    """Return whether a dotted name is a folder, a module or a name that occurs in a module."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        path = "/".join(parts[:count])
        if f"{path}.py" in FILES:
            return count == len(parts) or parts[count] in (ROOT / f"{path}.py").read_text()
        if path in FOLDERS:
            return count == len(parts)
    return False


@pytest.mark.parametrize("document", NAMING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_modules_named_in_document_exist(document: Path) -> None:
    text = document.read_text()
    assert {name for name in named_files(text) if not is_file(name)} <= MADE
    rooms = "|".join(
        sorted(folder.replace("/", r"\.") for folder in FOLDERS if folder.count("/") == 1)
    )
    modules = set(re.findall(rf"\b((?:{rooms})(?:\.\w+)*)\b", text))
    assert {name for name in modules if not is_module(name)} == set()
    paths = set(re.findall(rf"`((?:{'|'.join(TOPS)})/[\w/]*\w)/?`", text))
    assert paths - FOLDERS - FILES == set()


def test_files_in_architecture_tables_exist() -> None:
    tables = re.findall(
        r"^\| `([\w/]+)/` \|.*\n((?:\|.*\n)+)",
        (ROOT / "docs" / "ARCHITECTURE.md").read_text(),
        re.MULTILINE,
    )
    rows = [(folder, row.split("|")[1]) for folder, table in tables for row in table.splitlines()]
    named = {f"{folder}/{name}" for folder, cell in rows for name in named_files(cell)}
    assert len(named) > 100
    assert named <= FILES


def test_recorded_commands_match_the_readme() -> None:
    recording = ast.parse((ROOT / "docs" / "make_recording.py").read_text())
    (commands,) = (
        ast.literal_eval(node.value)
        for node in recording.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS"
    )
    text = (ROOT / "README.md").read_text()
    assert "".join(f"    {command}\n" for command in commands) in text


# ---- a program -------------------------------------------------------------------------------


def test_guide_programs_run_as_they_are(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block of code under "In a program" runs without other names.

    Regression: the first one used names that it did not define.
    """
    monkeypatch.setenv("KVSTORE_ADDRESS", shared_node.address)
    blocks = re.findall(
        r"(?:^    .*\n|^\n)+",
        section((ROOT / "docs" / "guide.md").read_text(), "In a program"),
        re.MULTILINE,
    )
    programs = [textwrap.dedent(block) for block in blocks if block.strip()]
    assert len(programs) == 2
    for found in (0, 2):
        names: dict[str, Any] = {}
        exec(compile(programs[0], "docs/guide.md", "exec"), names)
        assert names["layout"].page_nbytes == 8 << 20
        assert capsys.readouterr().out.startswith(f"{found} pages found; ")
    assert names["hits"] == [True, True]
    assert list(map(bytes, names["buffers"])) == names["pages"]
    exec(compile(programs[1], "docs/guide.md", "exec"), {})
