"""Render the chart into the manifests of `deploy/kubernetes`.

    python deploy/helm/render.py [HELM]

It runs Helm (`helm`, or the given program) once for each entry of RELEASES. The first line of a
manifest has the digest of the chart's files, so that tests notice a chart that was changed and not
rendered, without Helm.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE / "kvstore"
MANIFESTS = HERE.parent / "kubernetes"
# The values files of each manifest.
RELEASES = {"one": (), "three": ("three.yaml",), "gpu": ("gpu.yaml",)}


def digest() -> str:
    """Return a digest of the chart's files and of the values files."""
    found = hashlib.sha256()
    paths = [*CHART.rglob("*"), *(HERE / "examples").iterdir()]
    for path in sorted(path for path in paths if path.is_file() and not _is_monitoring(path)):
        found.update(f"{path.relative_to(HERE)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _is_monitoring(path: Path) -> bool:
    """Return whether a file is a link to `deploy/monitoring`: no manifest contains it."""
    return path.parent == CHART / "files"


def template(helm: str, *arguments: str) -> str:
    """Return what `helm template` prints for these arguments.

    Raise ValueError with Helm's message.
    """
    command = [helm, "template", "kvstore", str(CHART), "--namespace=kvstore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def rendered(helm: str, name: str) -> str:
    """Return the text of `deploy/kubernetes/NAME.yaml`."""
    files = [f"--values={HERE / 'examples' / file}" for file in RELEASES[name]]
    head = f"# Rendered from deploy/helm ({digest()}) by `make manifests`. Do not edit."
    lines = [head, *template(helm, *files).splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in lines if not line.startswith("# Source"))


def main(helm: str = "helm") -> None:
    """Write all manifests."""
    try:
        texts = {name: rendered(helm, name) for name in RELEASES}
    except FileNotFoundError:
        sys.exit(f"there is no program {helm}; install Helm, or run `make manifests`")
    except ValueError as error:
        sys.exit(str(error))
    for name, text in texts.items():
        (MANIFESTS / f"{name}.yaml").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
