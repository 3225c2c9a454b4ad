"""The rules of the house: imports point one way, third-party packages stay in the files that wrap
them, files and functions stay small, generated code is what the generator makes.
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

# Which file may import which package that is not the standard library's. A name that ends with a
# slash is a folder.
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
    "cryptography": ("kvstore/x509.py", "kvstore/cli/authority.py", "node/disk/encryption.py"),
    "rocksdict": ("node/disk/rows.py",),
    "typer": ("kvstore/cli/",),
    "click": ("kvstore/cli/",),
    "rich": ("kvstore/cli/",),
    "matplotlib": ("kvstore/cli/plan.py",),
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
# The floors of each package, from the ground up. A file imports files of its own floor and of those
# below; a name that ends with a slash is a room, `*` is every file at the top of the package that
# is named on no floor.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kvstore": (
        ("*", "pb/", "seals/"),
        ("transports/",),
        ("cluster/",),
        ("admin.py",),
        ("client.py",),
        ("__init__.py",),
        ("tools/",),
        ("doctor/",),
        ("cli/",),
    ),
    "node": (
        (
            "__init__.py",
            "clock.py",
            "config.py",
            "process.py",
            "pb/",
            "slab.py",
            "tls.py",
        ),
        ("auth/",),
        ("memory/",),
        ("disk/", "cluster/"),
        ("serving/",),
        ("gateway/",),
        ("console/",),
        ("server.py",),
        ("main.py",),
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
# Which of our own packages a package may import.
ARROWS = {
    "kvstore": {"kvstore"},
    "node": {"kvstore", "node"},
    "gpu_agent": {"kvstore", "gpu_agent"},
}


def sources(*tops: str) -> list[pathlib.Path]:
    """Python files written by hand."""
    return sorted(
        path for top in tops for path in (ROOT / top).rglob("*.py") if path.parent not in GENERATED
    )


@functools.cache
def statements(path: pathlib.Path) -> list[ast.stmt | ast.ExceptHandler]:
    """Of a file: only these can import, be a function or catch."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt | ast.ExceptHandler)
    ]


def imports(path: pathlib.Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere, lazily or not."""
    for statement in statements(path):
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path} imports relatively"
            yield statement.module or ""


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def may_import(path: pathlib.Path, module: str) -> bool:
    top = module.partition(".")[0]
    if top in PACKAGES:
        if f"{module}.".startswith("kvstore.cli.") and not name(path).startswith("kvstore/cli/"):
            return False
        return top in ARROWS[name(path).partition("/")[0]]
    if top in sys.stdlib_module_names:
        return True
    wrappers = (
        ALLOWED.get(module) or ALLOWED.get(".".join(module.split(".")[:2])) or ALLOWED.get(top, ())
    )
    return any(
        name(path) == wrapper or (wrapper[-1] == "/" and name(path).startswith(wrapper))
        for wrapper in wrappers
    )


def test_imports_point_one_way_and_third_parties_stay_where_they_are_wrapped() -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in sources(*PACKAGES)
        for module in imports(path)
        if not may_import(path, module)
    ]
    assert wrong == []


def test_the_rule_itself_refuses_what_it_should() -> None:
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


def floor(path: pathlib.Path) -> int:
    """Of a file in its package, 0 at the ground."""
    package, _, rest = name(path).partition("/")
    for number, rooms in enumerate(FLOORS[package]):
        if any(rest == room or (room[-1] == "/" and rest.startswith(room)) for room in rooms):
            return number
    assert "/" not in rest, f"{name(path)} is in no room of FLOORS"
    found = [number for number, rooms in enumerate(FLOORS[package]) if "*" in rooms]
    assert found, f"{name(path)} is on no floor of FLOORS"
    return found[0]


def module_file(module: str) -> pathlib.Path | None:
    """The source of one of our own modules; None for generated and foreign ones."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT / module.replace(".", "/")
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert found.exists(), f"{module} is no module"
    return None if found.parent in GENERATED else found


@functools.cache
def own_imports() -> dict[pathlib.Path, set[pathlib.Path]]:
    """What each file imports of ours, also what it imports for type checkers only."""
    return {
        path: {
            found
            for module in imports(path)
            if (found := module_file(module)) is not None and found != path
        }
        for path in sources(*PACKAGES)
    }


def circles(graph: dict[pathlib.Path, set[pathlib.Path]]) -> list[str]:
    """Files that are left when those that import nothing, or only such, are taken away again and
    again.
    """
    left = dict(graph)
    while ready := [path for path, wanted in left.items() if not wanted & left.keys()]:
        for path in ready:
            del left[path]
    return sorted(map(name, left))


def test_imports_go_down_the_floors() -> None:
    wrong = [
        f"{name(path)} imports {name(other)}, which is above"
        for path, others in own_imports().items()
        for other in others
        if name(path).partition("/")[0] == name(other).partition("/")[0]
        and floor(other) > floor(path)
    ]
    assert wrong == []


def test_no_two_files_import_each_other() -> None:
    assert circles(own_imports()) == []


def test_the_rule_of_circles_finds_one() -> None:
    one, two, three = (ROOT / "node" / f"{n}.py" for n in ("one", "two", "three"))
    assert circles({one: {two}, two: {one}, three: {one}}) == [
        "node/one.py",
        "node/three.py",
        "node/two.py",
    ]
    assert circles({one: {two}, two: set(), three: {one}}) == []


def test_the_environment_is_read_in_one_file() -> None:
    """`node/__init__.py` sets a variable of gRPC's, before gRPC is there.

    A gateway's process has few variables of its node's: the supervisor names them.
    """
    readers = [
        name(path)
        for path in sources(*PACKAGES)
        if re.search(r"os\.environ|os\.getenv", path.read_text())
    ]
    assert readers == ["kvstore/config.py", "node/__init__.py", "node/gateway/supervisor.py"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_install_needs_three_packages_only() -> None:
    """`import kvstore` with every other package hidden, as in an environment that has
    only these.
    """
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
    ("module", "strangers"),
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
def test_importing_a_package_loads_no_strangers(module: str, strangers: set[str]) -> None:
    code = f"import sys; import {module}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    # Without torch itself: it takes seconds, and what it loads is its own
    if module == "gpu_agent":
        code = (
            "import sys; from unittest.mock import MagicMock; sys.modules['torch'] = "
            f"MagicMock(); {code}"
        )
    assert set(run(code).split()) & strangers == set()


def test_generated_stubs_are_what_the_generator_makes(tmp_path: pathlib.Path) -> None:
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
    """Names of a class's bases, without their modules and parameters."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in class_.bases]


def is_protocol(class_: ast.ClassDef) -> bool:
    return "Protocol" in bases(class_)


def own_members(class_: ast.ClassDef) -> set[str]:
    """Methods, fields, and attributes that a method of the class assigns."""
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


# Protocols that describe an engine's objects, which have no class here.
FOREIGN = {"EngineRequest"}


def test_a_protocol_has_two_implementations() -> None:
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


def test_the_rule_of_protocols_counts_implementations() -> None:
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


def test_a_broad_except_logs_or_is_raised_again() -> None:
    """It may stand at a thread's or a request's edge only, and never swallow what it caught."""
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
                if not re.search(r"\braise\b|\blog\.|set_exception", text):
                    silent.append(f"{name(path)}:{node.lineno}")
    assert silent == []


def test_tests_and_proto_are_no_packages() -> None:
    """`proto` would shadow proto-plus, `tests/node` the package `node`."""
    assert [
        name(path) for top in ("tests", "proto") for path in (ROOT / top).rglob("__init__.py")
    ] == []


def test_modules_that_tests_find_shadow_no_package() -> None:
    """`pythonpath` in pyproject.toml goes before what is installed."""
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


def test_no_whole_prefix_hash_is_logged_or_told() -> None:
    """The command line shows them to who has asked for them."""
    told = [
        name(path)
        for path in sources(*PACKAGES)
        if not name(path).startswith("kvstore/cli/")
        and re.search(r"hash(es)?(\[\w+\])?\.hex\(\)", path.read_text())
    ]
    assert told == ["gpu_agent/engines/lmcache.py"]  # an answer to LMCache, which goes nowhere else
