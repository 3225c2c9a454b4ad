"""Compare two images, as written by `docker save`: every file and the configuration.

    python3 tests/docker/same.py ONE.tar TWO.tar

Exits with 0 if they are equal, and prints whether the layers are equal byte by byte, too. Exits
with 1 if they differ, and prints a line per difference. The build time is not compared, and so
neither is the image's digest.
"""

import hashlib
import json
import sys
import tarfile
from typing import IO, Any, NamedTuple

LINES_MAX = 20


class Entry(NamedTuple):
    """A file, directory or link in a layer; `content`: its hash, or where a link leads."""

    kind: str
    mode: str
    owner: str
    time_s: float
    content: str


class Image(NamedTuple):
    about: dict[str, Any]
    layers: list[str]
    files: dict[str, Entry]


def read(path: str) -> Image:
    """Return the one image in an archive."""
    with tarfile.open(path) as archive:
        (manifest,) = json.load(_part(archive, "manifest.json"))
        config = json.load(_part(archive, manifest["Config"]))
        files: dict[str, Entry] = {}
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=_part(archive, name)) as layer:
                files |= {member.name: _entry(layer, member) for member in layer}
    about = {
        key: value for key, value in config.items() if key not in ("created", "history", "rootfs")
    }
    return Image(about, config["rootfs"]["diff_ids"], files)


def _part(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None, f"{name} is no file"
    return found


def _entry(layer: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    content = member.linkname
    if member.isfile():
        content = hashlib.sha256(_part(layer, member.name).read()).hexdigest()
    owner = f"{member.uid}:{member.gid}"
    return Entry(member.type.decode(), oct(member.mode), owner, member.mtime, content)


def differences(one: Image, two: Image) -> list[str]:
    """Return a line for each difference in configuration and files."""
    keys = sorted(one.about.keys() | two.about.keys())
    unlike = [key for key in keys if one.about.get(key) != two.about.get(key)]
    lines = [f"{key}: {one.about.get(key)} / {two.about.get(key)}" for key in unlike]
    for name in sorted(one.files.keys() | two.files.keys()):
        first, second = one.files.get(name), two.files.get(name)
        if first is None or second is None:
            lines.append(f"{name}: only in the {'second' if first is None else 'first'}")
        elif first != second:
            unlike = [
                field for field in Entry._fields if getattr(first, field) != getattr(second, field)
            ]
            lines.append(
                f"{name}: "
                + ", ".join(f"{f} {getattr(first, f)} / {getattr(second, f)}" for f in unlike)
            )
    return lines


def main(one: str, two: str) -> int:
    first, second = read(one), read(two)
    lines = differences(first, second)
    for line in lines[:LINES_MAX]:
        print(line)
    if len(lines) > LINES_MAX:
        print(f"and {len(lines) - LINES_MAX} more")
    if lines:
        return 1
    layers = "the same, byte by byte" if first.layers == second.layers else "not the same bytes"
    print(
        f"{len(first.files)} files are the same, with names, modes, owners, times and contents; "
        f"layers are {layers}"
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit((__doc__ or "").strip())
    sys.exit(main(*sys.argv[1:]))
