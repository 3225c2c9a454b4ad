"""Tests of the code structure.

Imports go one way, third-party packages are imported only by the files that wrap them, files and
functions stay small, and the generated code is current.
"""

import ast
import collections
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("kvstore", "node", "gpu_agent")
GENERATED = (ROOT / "kvstore" / "pb", ROOT / "node" / "pb")
FILE_LINES_MAX = 600
FOLDER_FILES_MAX = 22
FUNCTION_LINES_MAX = 70

# Third-party packages and the files that may import them. Names that end with a slash are folders.
ALLOWED: dict[str, tuple[str, ...]] = {
    "grpc": (
        "kvstore/transports/status.py",
        "kvstore/transports/grpc_wire.py",
        "node/cluster/etcd.py",
        "node/gateway/",
    ),
    "grpc_health": ("node/gateway/server.py",),
    "grpc_reflection": ("node/gateway/server.py",),
    "google.protobuf": (
        "kvstore/cli/",
        "kvstore/transports/connections.py",
        "kvstore/transports/grpc_wire.py",
        "kvstore/messages.py",
        "node/serving/connection.py",
        "node/gateway/server.py",
        "node/serving/status.py",
    ),
    "opentelemetry": ("kvstore/otel.py",),
    "xxhash": ("kvstore/checksum.py",),
    "prometheus_client": ("node/serving/metrics.py",),
    "cryptography": (
        "kvstore/security/x509.py",
        "kvstore/cli/authority.py",
        "node/disk/encryption.py",
    ),
    "tomli": ("node/config_file.py",),
    "rocksdict": ("node/disk/rows.py",),
    "typer": ("kvstore/cli/",),
    "click": ("kvstore/cli/",),
    "rich": ("kvstore/cli/",),
    "matplotlib": ("kvstore/cli/plan.py",),
    "zmq": ("kvstore/bridge/",),
    "msgpack": ("kvstore/bridge/",),
    "torch": ("gpu_agent/",),
    "cupy": ("gpu_agent/kernels/",),
    "transformers": (
        "gpu_agent/engines/transformers.py",
        "gpu_agent/engines/transformers_paged.py",
    ),
    "vllm": ("gpu_agent/engines/",),
    "sglang": ("gpu_agent/engines/",),
    "lmcache": ("gpu_agent/engines/",),
}
# The layers of each package, lowest first. A file may import files of its own layer and of lower
# ones. Names that end with a slash are folders; `*` stands for all files at the top of the package
# that no layer names.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kvstore": (
        ("*", "pb/", "results/", "seals/", "security/"),
        ("transports/",),
        ("cluster/",),
        ("admin.py",),
        ("client.py",),
        ("__init__.py",),
        ("aio/",),
        ("tools/",),
        ("bridge/",),
        ("doctor/",),
        ("cli/",),
        ("__main__.py",),
    ),
    "node": (
        (
            "__init__.py",
            "clock.py",
            "config.py",
            "config_file.py",
            "process.py",
            "pb/",
            "slab.py",
            "systemd.py",
            "tls.py",
        ),
        ("auth/",),
        ("memory/",),
        ("disk/", "cluster/", "feed/", "hints/", "events.py"),
        ("serving/",),
        ("gateway/",),
        ("console/",),
        ("server.py",),
        ("main.py",),
        ("__main__.py", "local.py"),
    ),
    "gpu_agent": (
        ("*",),
        ("objects/",),
        ("kernels/", "layouts/"),
        ("agent.py",),
        ("__init__.py",),
        ("blocks/", "host/"),
        ("identity/", "worker/"),
        ("engines/",),
    ),
}
# Which of our own packages each package may import.
PACKAGE_IMPORTS = {
    "kvstore": {"kvstore"},
    "node": {"kvstore", "node"},
    "gpu_agent": {"kvstore", "gpu_agent"},
}


def sources(*tops: str) -> list[pathlib.Path]:
    """Return the handwritten Python files."""
    return sorted(
        path for top in tops for path in (ROOT / top).rglob("*.py") if path.parent not in GENERATED
    )


@functools.cache
def statements(path: pathlib.Path) -> list[ast.stmt | ast.ExceptHandler]:
    """Return a file's statements and exception handlers."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt | ast.ExceptHandler)
    ]


def imports(path: pathlib.Path) -> Iterator[str]:
    """Yield the full names of the modules that a file imports anywhere, lazily or not."""
    for statement in statements(path):
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path} has a relative import"
            yield statement.module or ""


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def may_import(path: pathlib.Path, module: str) -> bool:
    top = module.partition(".")[0]
    if top in PACKAGES:
        callers = ("kvstore/cli/", "kvstore/__main__.py")
        if f"{module}.".startswith("kvstore.cli.") and not name(path).startswith(callers):
            return False
        return top in PACKAGE_IMPORTS[name(path).partition("/")[0]]
    if top in sys.stdlib_module_names:
        return True
    wrappers = (
        ALLOWED.get(module) or ALLOWED.get(".".join(module.split(".")[:2])) or ALLOWED.get(top, ())
    )
    return any(
        name(path) == wrapper or (wrapper[-1] == "/" and name(path).startswith(wrapper))
        for wrapper in wrappers
    )


def test_imports_are_allowed() -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in sources(*PACKAGES)
        for module in imports(path)
        if not may_import(path, module)
    ]
    assert wrong == []


def test_import_rule_rejects_forbidden_imports() -> None:
    for path, module in [
        ("kvstore/client.py", "node.server"),
        ("kvstore/client.py", "gpu_agent"),
        ("kvstore/client.py", "torch"),
        ("kvstore/client.py", "grpc"),
        ("node/server.py", "gpu_agent.pool"),
        ("node/server.py", "kvstore.cli.output"),
        ("node/server.py", "torch.cuda"),
        ("gpu_agent/agent.py", "node.config"),
        ("gpu_agent/agent.py", "transformers"),
        ("node/memory/tier.py", "google.protobuf.message"),
        ("node/memory/tier.py", "numpy"),
    ]:
        assert not may_import(ROOT / path, module), f"{path} may import {module}"
    assert may_import(ROOT / "node/server.py", "kvstore.errors")


def layer(path: pathlib.Path) -> int:
    """Return the number of a file's layer in its package; 0 is the lowest."""
    package, _, rest = name(path).partition("/")
    for number, parts in enumerate(LAYERS[package]):
        if any(rest == part or (part[-1] == "/" and rest.startswith(part)) for part in parts):
            return number
    assert "/" not in rest, f"{name(path)} is in no folder of LAYERS"
    found = [number for number, parts in enumerate(LAYERS[package]) if "*" in parts]
    assert found, f"{name(path)} is in no layer of LAYERS"
    return found[0]


def module_file(module: str) -> pathlib.Path | None:
    """Return the source file of one of our modules, or None for generated and foreign ones."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT / module.replace(".", "/")
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert found.exists(), f"{module} does not exist"
    return None if found.parent in GENERATED else found


@functools.cache
def own_imports() -> dict[pathlib.Path, set[pathlib.Path]]:
    """Return the files of ours that each file imports, including imports for type checkers."""
    return {
        path: {
            found
            for module in imports(path)
            if (found := module_file(module)) is not None and found != path
        }
        for path in sources(*PACKAGES)
    }


def cycles(graph: dict[pathlib.Path, set[pathlib.Path]]) -> list[str]:
    """Return the files that import each other in a cycle, and those that import such files.

    Files that import nothing, or only files already removed, are removed until none is left.
    """
    left = dict(graph)
    while ready := [path for path, wanted in left.items() if not wanted & left.keys()]:
        for path in ready:
            del left[path]
    return sorted(map(name, left))


def test_imports_go_to_the_same_or_a_lower_layer() -> None:
    wrong = [
        f"{name(path)} imports {name(other)}, which is in a higher layer"
        for path, others in own_imports().items()
        for other in others
        if name(path).partition("/")[0] == name(other).partition("/")[0]
        and layer(other) > layer(path)
    ]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    assert cycles(own_imports()) == []


def test_cycle_rule_finds_a_cycle() -> None:
    one, two, three = (ROOT / "node" / f"{n}.py" for n in ("one", "two", "three"))
    assert cycles({one: {two}, two: {one}, three: {one}}) == [
        "node/one.py",
        "node/three.py",
        "node/two.py",
    ]
    assert cycles({one: {two}, two: set(), three: {one}}) == []


def test_only_known_files_read_the_environment() -> None:
    """Only four files read environment variables.

    `kvstore/config.py` reads the settings, `node/__init__.py` sets a variable before gRPC is
    imported, and the gateway's supervisor selects the variables that a gateway process inherits.
    SGLang takes the sizes of its stages from one of its own.
    """
    readers = [
        name(path)
        for path in sources(*PACKAGES)
        if re.search(r"os\.environ|os\.getenv", path.read_text())
    ]
    ours = ["kvstore/config.py", "node/__init__.py", "node/gateway/supervisor.py"]
    assert sorted(readers) == ["gpu_agent/identity/sglang.py", *ours]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_base_install_needs_only_three_packages() -> None:
    """`import kvstore` works when every package but its three dependencies is hidden."""
    run(
        """
import sys
from importlib.abc import MetaPathFinder

WANTED = {"kvstore", "grpc", "google", "xxhash", "typing_extensions"}

class Hide(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in WANTED:
            raise ModuleNotFoundError(f"hidden: {fullname}", name=fullname)

sys.meta_path.insert(0, Hide())
import kvstore
assert kvstore.Client and kvstore.__version__
"""
    )


@pytest.mark.parametrize(
    ("module", "unrelated"),
    [
        (
            "kvstore",
            {
                "node",
                "gpu_agent",
                "torch",
                "typer",
                "rich",
                "prometheus_client",
                "numpy",
                "cryptography",
            },
        ),
        ("node.server", {"gpu_agent", "torch", "typer", "rich", "transformers", "numpy"}),
        (
            "gpu_agent",
            {
                "node",
                "typer",
                "rich",
                "prometheus_client",
                "transformers",
                "cupy",
                "numpy",
                "cryptography",
            },
        ),
    ],
)
def test_import_loads_no_unrelated_packages(module: str, unrelated: set[str]) -> None:
    code = f"import sys; import {module}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    # torch is mocked: importing it takes seconds, and its own imports do not matter here
    if module == "gpu_agent":
        code = (
            "import sys; from unittest.mock import MagicMock; sys.modules['torch'] = "
            f"MagicMock(); {code}"
        )
    assert set(run(code).split()) & unrelated == set()


def test_generated_stubs_are_current(tmp_path: pathlib.Path) -> None:
    pytest.importorskip(
        "grpc_tools",
        reason="grpcio-tools has no wheel for this Python; `make proto` needs an older one",
    )
    arguments = ["-I", "proto", "proto/kvstore/pb/kvstore.proto", "proto/node/pb/etcd.proto"]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *outputs, *arguments], cwd=ROOT, check=True
    )
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    kinds = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    stems = ("kvstore/pb/kvstore", "node/pb/etcd")
    assert [str(path) for path in made] == [stem + kind for stem in stems for kind in kinds]
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), (
            f"{path} is out of date: make proto"
        )


def test_files_are_small() -> None:
    lines = {
        name(path): len(path.read_text().splitlines())
        for path in sources(*PACKAGES, "benchmarks", "tests")
    }
    assert {path: count for path, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_folders_are_small() -> None:
    counts = collections.Counter(
        path.parent.relative_to(ROOT).as_posix() for path in sources(*PACKAGES)
    )
    assert {folder: count for folder, count in counts.items() if count > FOLDER_FILES_MAX} == {}


def test_functions_are_small() -> None:
    long = []
    for path in sources(*PACKAGES, "benchmarks"):
        for node in statements(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > FUNCTION_LINES_MAX:
                    long.append(f"{name(path)}:{node.lineno} {node.name} has {count} lines")
    assert long == []


def bases(class_: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without their modules and type parameters."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in class_.bases]


def is_protocol(class_: ast.ClassDef) -> bool:
    return "Protocol" in bases(class_)


def own_members(class_: ast.ClassDef) -> set[str]:
    """Return a class's methods, fields, and attributes that its methods assign."""
    found = set()
    for part in class_.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
            found |= {
                node.attr
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign):
            found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    return found


def implementations(classes: list[ast.ClassDef]) -> dict[str, set[str]]:
    """Return, for each Protocol, the classes that derive from it or have all of its members."""
    named = collections.defaultdict(list)
    for class_ in classes:
        named[class_.name].append(class_)

    def members(class_: ast.ClassDef) -> set[str]:
        inherited = (
            other for base in bases(class_) for other in named[base] if other is not class_
        )
        return own_members(class_).union(*map(members, inherited))

    whole = {id(class_): members(class_) for class_ in classes}
    return {
        protocol.name: {
            class_.name
            for class_ in classes
            if not is_protocol(class_)
            and (protocol.name in bases(class_) or whole[id(protocol)] <= whole[id(class_)])
        }
        for protocol in classes
        if is_protocol(protocol)
    }


# Protocols that describe objects of an engine, whose classes are not in this repository.
FOREIGN = {"EngineRequest"}


def test_protocol_has_two_implementations() -> None:
    classes = [
        node
        for path in sources(*PACKAGES)
        for node in statements(path)
        if isinstance(node, ast.ClassDef)
    ]
    found = implementations(classes)
    few = {
        name: sorted(those)
        for name, those in found.items()
        if name not in FOREIGN and len(those) < 2
    }
    assert few == {}


def test_protocol_rule_counts_implementations() -> None:
    code = """
class Store(Protocol):
    name: str
    def get(self): ...
class Base:
    def get(self): ...
class One(Base):
    def __init__(self):
        self.name = "one"
class Two:
    def get(self): ...
"""
    assert implementations(
        [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    ) == {"Store": {"One"}}


def test_broad_except_logs_or_reraises() -> None:
    """Every broad except logs the exception, raises it, or passes it to a future or a generator.

    Such handlers belong at the edge of a thread or a request, and must not swallow exceptions.
    """
    silent = []
    for path in sources(*PACKAGES):
        for node in statements(path):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (
                    isinstance(node.type, ast.Name)
                    and node.type.id in ("Exception", "BaseException")
                )
            ):
                text = ast.unparse(node)
                if not re.search(r"\braise\b|\blog\.|set_exception|\.throw\(", text):
                    silent.append(f"{name(path)}:{node.lineno}")
    assert silent == []


def test_tests_and_proto_are_not_packages() -> None:
    """`tests` and `proto` have no `__init__.py`.

    As packages, `proto` would shadow proto-plus, and `tests/node` would shadow `node`.
    """
    assert [
        name(path) for top in ("tests", "proto") for path in (ROOT / top).rglob("__init__.py")
    ] == []


def test_helper_modules_shadow_no_package() -> None:
    """No module of the tests and benchmarks has the name of a package that is imported.

    `pythonpath` in pyproject.toml comes before the installed packages, so it would shadow that
    package.
    """
    found = {
        path.stem
        for folder in ("tests/helpers", "tests/fuzz", "benchmarks")
        for path in (ROOT / folder).glob("*.py")
    }
    assert (
        found & ({wrapper.partition(".")[0] for wrapper in ALLOWED} | set(PACKAGES) | {"lightllm"})
        == set()
    )
    assert found & sys.stdlib_module_names == set()


def test_no_whole_prefix_hash_is_logged_or_sent() -> None:
    """No code outside the command line formats a whole prefix hash, so none is logged or sent.

    The command line prints hashes to its own user.
    """
    found = [
        name(path)
        for path in sources(*PACKAGES)
        if not name(path).startswith("kvstore/cli/")
        and re.search(r"hash(es)?(\[\w+\])?\.hex\(\)", path.read_text())
    ]
    # The LMCache adapter returns the hash to LMCache itself
    assert found == ["gpu_agent/engines/lmcache.py"]
