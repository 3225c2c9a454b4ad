"""The entry point of `vllm.general_plugins`, with factories as vLLM's.

`tests/engines/vllm/test_one_line.py` starts a real server with it.
"""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gpu_agent.engines.vllm_plugin import FACTORIES

FACTORY = """
class {name}:
    registry = {{}}

    @classmethod
    def {method}(cls, name, module_path, class_name):
        if name in cls.registry:
            raise ValueError(f"{{name}} is already registered")
        cls.registry[name] = (module_path, class_name)

{name}.{method}("Another", "somewhere", "Another")
"""
REPORT = """
import importlib
for module in ({modules}):
    found = vars(importlib.import_module(module))
    (factory,) = (kind for name, kind in found.items() if name.endswith("Factory"))
    print(*(f"{{name}}={{home}}:{{kind}}" for name, (home, kind) in factory.registry.items()))
"""
ALL = ", ".join(map(repr, FACTORIES))
EXPECTED = [
    "Another=somewhere:Another "
    + " ".join(f"{name}={home}:{name}" for name, home in found.classes.items())
    for found in FACTORIES.values()
]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Make a package `vllm` that has the factories."""
    for module, found in FACTORIES.items():
        path = tmp_path / module.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(FACTORY.format(name=found.name, method=found.method))
    return tmp_path


def run(engine: Path, code: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(engine)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_register_imports_nothing_and_adds_our_classes_when_vllm_imports_its_factories(
    engine: Path,
) -> None:
    code = f"""
import gpu_agent.engines.vllm_plugin as plugin
heavy = {{"torch", "vllm", "grpc", "google", "xxhash"}}
plugin.register()
plugin.register()
print(heavy & {{name.partition(".")[0] for name in sys.modules}})
{REPORT.format(modules=ALL)}
"""
    assert run(engine, code) == ["set()", *EXPECTED]


def test_register_adds_our_classes_to_factories_that_are_imported_already(engine: Path) -> None:
    code = f"""
{REPORT.format(modules=ALL)}
import gpu_agent.engines.vllm_plugin as plugin
plugin.register()
plugin.register()
{REPORT.format(modules=ALL)}
"""
    assert run(engine, code)[len(EXPECTED) :] == EXPECTED


def test_vllm_without_a_factory_or_with_another_starts(engine: Path) -> None:
    first, second, third = FACTORIES
    (engine / second.replace(".", "/")).with_suffix(".py").write_text("class ThatFactory: ...")
    (engine / third.replace(".", "/")).with_suffix(".py").unlink()
    found = FACTORIES[first]
    taken = FACTORY.format(name=found.name, method=found.method)
    taken += f'{found.name}.{found.method}("KVStoreConnector", "theirs", "KVStoreConnector")\n'
    (engine / first.replace(".", "/")).with_suffix(".py").write_text(taken)
    code = f"""
import gpu_agent.engines.vllm_plugin as plugin
plugin.register()
{REPORT.format(modules=repr(first) + ",")}
import {second}
try:
    import {third}
except ModuleNotFoundError as error:
    print(error)
"""
    line, error = run(engine, code)
    assert "KVStoreConnector=theirs:KVStoreConnector" in line
    assert error == f"No module named '{third}'"


def test_loader_that_can_not_be_watched_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_agent.engines import vllm_plugin

    class Fixed:
        __slots__ = ()

        def create_module(self, spec: ModuleSpec) -> None: ...

        def exec_module(self, module: object) -> None: ...

    name = next(iter(FACTORIES))
    spec = ModuleSpec(name, Fixed())  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_plugin.importlib.machinery.PathFinder, "find_spec", lambda *_: spec)
    assert vllm_plugin._Waiting().find_spec(name, None) is spec


def test_entry_point_names_the_function() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert 'kvstore = "gpu_agent.engines.vllm_plugin:register"' in text
