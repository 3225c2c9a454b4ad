"""The wheel of `make dist`, built from this checkout and installed into an empty environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The files that pyproject.toml includes in a build, which runs on a copy of them
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kvstore", "node", "gpu_agent")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that does not see our sources, and return its output."""
    # Let Python write bytecode, so that later commands start faster
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def installed(work: Path, builder: str = sys.executable) -> Path:
    """Return an interpreter of a new environment in `work` that has the wheel.

    Its dependencies come from this environment. `builder` is one that has hatchling and pip.
    """
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy2
        copy(ROOT / source, work / source)
    # Call the build backend as pip would
    build = "import hatchling.build as backend; backend.build_wheel('dist')"
    run(builder, "-c", build, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    assert wheel.name.startswith("kvstore_llm-")
    run(sys.executable, "-m", "venv", "--without-pip", work / "venv")
    python = work / "venv" / "bin" / "python"
    pip = (builder, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel)
    # Python ignores .pth files in a folder named by a .pth, so an editable install stays out
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
